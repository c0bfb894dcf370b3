"""A file system that never answers, laid over a folder: FUSE whose other end takes questions and says nothing.

    python3 hung.py <mount namespace's file> <folder>

mounts it there, says so, and takes it away when its input ends: whoever waits in it then gets an error.
"""
import contextlib
import ctypes
import os
import subprocess
import sys

CLONE_NEWNS, MNT_DETACH = 0x00020000, 2


def checked(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main(namespace, folder):
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as handle:
        checked(libc.setns(handle.fileno(), CLONE_NEWNS))
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    checked(libc.mount(b"hung", os.fsencode(folder), b"fuse", 0, options.encode()))
    print("mounted", flush=True)
    sys.stdin.read()
    checked(libc.umount2(os.fsencode(folder), MNT_DETACH))
    os.close(device)


@contextlib.contextmanager
def hung(pid, *folders):
    """While this lasts, nothing in these folders answers the process."""
    children = []
    try:
        for folder in folders:
            words = [sys.executable, __file__, f"/proc/{pid}/ns/mnt", str(folder)]
            children.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            if children[-1].stdout.readline() != b"mounted\n":
                raise OSError(f"no file system that hangs can be laid over {folder}")
        yield
    finally:
        for child in reversed(children):
            child.communicate(timeout=20)


if __name__ == "__main__":
    main(*sys.argv[1:])
