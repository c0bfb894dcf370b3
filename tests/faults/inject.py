"""Makes one system call of a process fail, without the process being built for it.

The kernel hands the calls in `CALLS` to this supervisor before they are done (seccomp's user notification, Linux 5.6),
which lets them go on or answers with an error. Why so, and not with points in the code, a preloaded library or ptrace:
the binary under test is the one that is shipped; calls are seen that go round the C library (rustix, a static build);
one place knows what all threads did, so "the third read of the token" is a call and not a call for each thread; and it
needs neither root nor a tool. Reads of the clock are not calls (vDSO): `day.py` steps it instead.
"""
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import select
import socket
import struct
import threading

# Name: number on x86-64, number on arm64 (None: not there), error. The errors are those that the calls can give.
CALLS = {
    "open": (2, None, "EMFILE"), "openat": (257, 56, "EMFILE"), "openat2": (437, 437, "EMFILE"),
    "read": (0, 63, "EIO"), "pread64": (17, 67, "EIO"), "readv": (19, 65, "EIO"), "write": (1, 64, "ENOSPC"),
    "writev": (20, 66, "ENOSPC"), "pwrite64": (18, 68, "ENOSPC"), "rename": (82, None, "EROFS"),
    "renameat": (264, 38, "EROFS"), "renameat2": (316, 276, "EROFS"), "unlink": (87, None, "EBUSY"),
    "unlinkat": (263, 35, "EBUSY"), "mkdir": (83, None, "ENOSPC"), "mkdirat": (258, 34, "ENOSPC"),
    "fsync": (74, 82, "EIO"), "fdatasync": (75, 83, "EIO"), "ftruncate": (77, 46, "EIO"), "chmod": (90, None, "EPERM"),
    "fchmod": (91, 52, "EPERM"), "fchmodat": (268, 53, "EPERM"), "stat": (4, None, "EACCES"), "lstat": (6, None, "EACCES"),
    "fstat": (5, 80, "EIO"), "newfstatat": (262, 79, "EACCES"), "statx": (332, 291, "EACCES"),
    "access": (21, None, "EACCES"), "faccessat": (269, 48, "EACCES"), "faccessat2": (439, 439, "EACCES"),
    "readlink": (89, None, "EACCES"), "readlinkat": (267, 78, "EACCES"), "getdents64": (217, 61, "EIO"),
    "link": (86, None, "EPERM"), "linkat": (265, 37, "EPERM"), "symlink": (88, None, "EPERM"), "symlinkat": (266, 36, "EPERM"),
    "flock": (73, 32, "ENOLCK"), "inotify_init1": (294, 26, "EMFILE"), "inotify_add_watch": (254, 27, "ENOSPC"),
    "socket": (41, 198, "EMFILE"), "socketpair": (53, 199, "EMFILE"), "bind": (49, 200, "EADDRINUSE"),
    "listen": (50, 201, "EADDRINUSE"), "connect": (42, 203, "ECONNREFUSED"), "accept4": (288, 242, "EMFILE"),
    "getsockname": (51, 204, "ENOBUFS"), "getpeername": (52, 205, "ENOTCONN"), "setsockopt": (54, 208, "EINVAL"),
    "getsockopt": (55, 209, "ENOBUFS"), "sendto": (44, 206, "EPIPE"), "sendmsg": (46, 211, "EPIPE"),
    "recvfrom": (45, 207, "ECONNRESET"), "recvmsg": (47, 212, "ECONNRESET"), "shutdown": (48, 210, "ENOTCONN"),
    "clone": (56, 220, "EAGAIN"), "vfork": (58, None, "EAGAIN"), "fork": (57, None, "EAGAIN"), "clone3": (435, 435, "EAGAIN"),
    "execve": (59, 221, "ETXTBSY"), "wait4": (61, 260, "ECHILD"), "waitid": (247, 95, "ECHILD"), "kill": (62, 129, "EPERM"),
    "pidfd_open": (434, 434, "EMFILE"), "pidfd_send_signal": (424, 424, "EPERM"), "pipe2": (293, 59, "EMFILE"),
    "prctl": (157, 167, "EINVAL"), "setpgid": (109, 154, "EPERM"), "epoll_create1": (291, 20, "EMFILE"),
    "epoll_ctl": (233, 21, "ENOSPC"), "eventfd2": (290, 19, "EMFILE"), "getsid": (124, 156, "EPERM"),
}
ARM = platform.machine() == "aarch64"
NUMBERS = {(row[1] if ARM else row[0]): name for name, row in CALLS.items() if (row[1] if ARM else row[0]) is not None}
# The argument that is a path.
PATHS = {"open": 0, "openat": 1, "openat2": 1, "rename": 0, "renameat": 1, "renameat2": 1, "unlink": 0, "unlinkat": 1, "mkdir": 0,
         "mkdirat": 1, "chmod": 0, "fchmodat": 1, "stat": 0, "lstat": 0, "newfstatat": 1, "statx": 1, "access": 0, "faccessat": 1,
         "faccessat2": 1, "readlink": 0, "readlinkat": 1, "link": 0, "linkat": 1, "symlink": 1, "symlinkat": 2,
         "inotify_add_watch": 1, "execve": 0}
# The argument that is a descriptor is the first, but for these, which have none.
NONE = {"socket", "socketpair", "clone", "vfork", "fork", "clone3", "wait4", "waitid", "kill", "pidfd_open", "pipe2", "prctl",
        "setpgid", "epoll_create1", "eventfd2", "getsid", "inotify_init1"}
SECCOMP, PIDFD_OPEN, PIDFD_GETFD = (277 if ARM else 317), 434, 438
RECV, SEND = 0xC0502100, 0xC0182101
GO_ON = 1
libc = ctypes.CDLL(None, use_errno=True)


def syscall(*words):
    done = libc.syscall(*[ctypes.c_long(w) if isinstance(w, int) else w for w in words])
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


def program():
    """The filter: calls in `CALLS` to the supervisor, all others done."""
    def step(code, yes, no, k):
        return struct.pack("HBBI", code, yes, no, k)
    numbers = sorted(NUMBERS)
    steps = [step(0x20, 0, 0, 0)]
    for at, number in enumerate(numbers):
        steps.append(step(0x15, len(numbers) - at, 0, number))
    return b"".join([*steps, step(0x06, 0, 0, 0x7FFF0000), step(0x06, 0, 0, 0x7FC00000)])


def read(tid, place, length, until=None):
    """Memory of a process, up to `length` bytes or a byte that is in it."""
    data = b""
    with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
        memory.seek(place)
        while len(data) < length and (until is None or until not in data):
            # Up to the end of a page, which may be the last one.
            data += memory.read(min(length - len(data), 256, 4096 - memory.tell() % 4096))
    return data


class Injector:
    """Supervises one process: `before` is its `preexec_fn`. `plan` maps keys of calls to the errors they get.

    A key is a phase, a call, what it is about and its number among its likes: `start openat ./token 1`. Keys are the
    same from run to run as far as the process does the same.
    """

    def __init__(self, home, ports, plan=()):
        self.home, self.ports, self.plan = os.path.realpath(home), ports, dict(plan)
        self.phase, self.seen, self.order, self.struck = "start", {}, [], []
        self.shared = mmap.mmap(-1, 16)
        self.main, self.owner = 0, {}
        code = program()
        self.code = ctypes.create_string_buffer(code, len(code))
        self.filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(self.code)), 16)
        self.over = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def before(self):
        libc.prctl(38, 1, 0, 0, 0)
        listener = syscall(SECCOMP, 1, 8, ctypes.addressof(self.filter))
        # Only memory tells the supervisor: every call waits for it from here on. (Popen must not close the listener.)
        self.shared[0:8] = struct.pack("ii", os.getpid(), listener)

    def run(self):
        while not self.over:
            pid, listener = struct.unpack("ii", self.shared[0:8])
            if listener:
                break
            threading.Event().wait(0.002)
        else:
            return
        self.main = pid
        self.listener = syscall(PIDFD_GETFD, syscall(PIDFD_OPEN, pid, 0), listener, 0)
        waiting = select.poll()
        waiting.register(self.listener, select.POLLIN)
        while not self.over:
            ready = waiting.poll(200)
            if any(events & select.POLLHUP for _, events in ready):
                return
            if not ready:
                continue
            notice = bytearray(80)
            try:
                fcntl.ioctl(self.listener, RECV, notice)
            except OSError:
                # Whoever asked is gone.
                continue
            ident, tid = struct.unpack_from("QI", notice)
            number = struct.unpack_from("i", notice, 16)[0]
            arguments = struct.unpack_from("6Q", notice, 32)
            try:
                code = self.judge(tid, NUMBERS.get(number, ""), arguments)
            except OSError:
                code = 0
            answer = struct.pack("QqiI", ident, 0, -code, 0 if code else GO_ON)
            try:
                fcntl.ioctl(self.listener, SEND, answer)
            except OSError:
                pass

    # Whose call it is: the agent's, one of a child that has not executed its program yet, or none of ours.
    def whose(self, tid):
        known = self.owner.get(tid)
        if known is None:
            with open(f"/proc/{tid}/status") as status:
                lines = dict(line.split(":\t", 1) for line in status if line.startswith(("Tgid", "PPid")))
            group, parent = int(lines["Tgid"]), int(lines["PPid"])
            if group == self.main:
                known = "agent"
            else:
                known = "foreign" if {self.owner.get(group), self.owner.get(parent)} & {"foreign"} else "child"
            self.owner[tid] = known
        return known

    def judge(self, tid, name, arguments):
        whose = self.whose(tid)
        if whose == "foreign":
            return 0
        if name == "execve":
            # The first one is how the agent itself comes to be.
            first = whose == "agent"
            if whose == "child":
                self.owner[tid] = "foreign"
            if first:
                return 0
        about = self.about(tid, name, arguments)
        # What the loader does before the program begins is not the program's.
        if about is None or about.startswith(("/usr/lib", "/lib", "/etc/ld.so")):
            return 0
        kind = f"{self.phase} {name}{' of a child' if whose == 'child' else ''} {about}"
        number = self.seen[kind] = self.seen.get(kind, 0) + 1
        key = f"{kind} {number}"
        self.order.append(key)
        code = self.plan.get(key)
        if code:
            self.struck.append(key)
            if name == "execve":
                self.owner[tid] = "child"
            return getattr(errno, code)
        return 0

    def about(self, tid, name, arguments):
        """What a call is about, in words that are the same in the next run; `None`: it cannot fail in this way."""
        if name in PATHS:
            path = read(tid, arguments[PATHS[name]], 4096, b"\0").split(b"\0")[0].decode(errors="replace")
            if not path:
                return self.descriptor(tid, arguments[0])
            return self.tidy(path)
        if name in NONE:
            return str(arguments[0]) if name in ("socket", "prctl") else "-"
        if name in ("bind", "connect"):
            return self.address(tid, arguments[1], arguments[2])
        if name == "epoll_ctl":
            return self.descriptor(tid, arguments[2])
        return self.descriptor(tid, arguments[0])

    def address(self, tid, place, length):
        data = read(tid, place, min(length, 110))
        family = struct.unpack_from("H", data)[0]
        if family == socket.AF_UNIX:
            return "unix:" + self.tidy(data[2:].split(b"\0")[0].decode(errors="replace") or "?")
        if family == socket.AF_NETLINK:
            return "netlink"
        return "tcp:" + self.ports.get(int.from_bytes(data[2:4], "big"), "?")

    def descriptor(self, tid, number):
        number = ctypes.c_int(number & 0xFFFFFFFF).value
        to = os.readlink(f"/proc/{tid}/fd/{number}")
        if to.startswith("socket:"):
            return self.socket(tid, number)
        # A read of these never fails, and says nothing of files.
        if to.startswith(("anon_inode:", "/dev/null")):
            return None
        return "pipe" if to.startswith("pipe:") else self.tidy(to)

    def socket(self, tid, number):
        pidfd = syscall(PIDFD_OPEN, self.main, 0)
        try:
            copy = syscall(PIDFD_GETFD, pidfd, number, 0)
        finally:
            os.close(pidfd)
        with socket.socket(fileno=copy) as io:
            names = []
            for ask in (io.getsockname, io.getpeername):
                try:
                    names.append(ask())
                except OSError:
                    names.append(None)
        if io.family == socket.AF_UNIX:
            own, peer = [n.decode() if isinstance(n, bytes) else n for n in names]
            if not own and peer == "":
                # A pair of its own: signals come through it, and it cannot break.
                return None
            return f"unix:{self.tidy(own or peer or '?')}"
        if io.family == socket.AF_NETLINK:
            return "netlink"
        ports = [n[1] if isinstance(n, tuple) and len(n) > 1 else 0 for n in names]
        known = [self.ports[p] for p in ports if p in self.ports]
        return f"tcp:{known[0] if known else '?'}"

    def tidy(self, path):
        above = os.path.dirname(self.home)
        if path.startswith(self.home):
            path = "." + path[len(self.home):]
        elif path.startswith(above):
            path = "world" + path[len(above):]
        elif not path.startswith(("/", ".", "pipe", "world")):
            path = "./" + path
        path = re.sub(r"/proc/\d+", "/proc/N", path)
        path = re.sub(r"\.[A-Za-z0-9]{6}\.new$", ".X.new", path)
        return re.sub(r"\d{3,}|[0-9a-f]{8,}", "N", path)

    def close(self):
        self.over = True
        self.thread.join(5)
        self.shared.close()
