# Servers for traffic tests: `8080` answers each line with `<line> from <peer>`; `dns` answers every query of
# port 53 with 203.0.113.9; `run` has the name that a run of istio-iptables takes. Says `up` when all of them listen.
import socket
import struct
import sys
import threading

def line(conn, peer):
    text = conn.makefile().readline().strip()
    conn.sendall(f"{text} from {peer[0].removeprefix('::ffff:')}\n".encode())
    # What comes after the first line is read as well: a close with bytes unread is a reset, and Envoy hands
    # that on, with or without the answer.
    conn.shutdown(socket.SHUT_WR)
    while conn.recv(4096):
        pass
    conn.close()

def answer(query):
    return query[:2] + b"\x81\x80\0\x01\0\x01\0\0\0\0" + query[12:] + b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04" + bytes([203, 0, 113, 9])

def stream(conn, peer):
    head = conn.recv(2, socket.MSG_WAITALL)
    reply = answer(conn.recv(struct.unpack("!H", head)[0], socket.MSG_WAITALL))
    conn.sendall(struct.pack("!H", len(reply)) + reply)
    conn.close()

def accept(listener, handle):
    while True:
        conn, peer = listener.accept()
        threading.Thread(target=handle, args=(conn, peer), daemon=True).start()

def datagrams(sock):
    while True:
        query, peer = sock.recvfrom(4096)
        sock.sendto(answer(query), peer)

threads = []
names = []
for what in sys.argv[1:]:
    if what == "run":
        for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:
            names.append(socket.socket(socket.AF_UNIX, kind))
            names[-1].bind("\0pilot-agent istio-iptables")
        names[0].listen()
        threads.append(threading.Thread(target=names[1].recv, args=(1,)))
        continue
    port, handle = (53, stream) if what == "dns" else (int(what), line)
    listener = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    threads.append(threading.Thread(target=accept, args=(listener, handle)))
    if what == "dns":
        sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("::", port))
        threads.append(threading.Thread(target=datagrams, args=(sock,)))
print("up", flush=True)
for thread in threads:
    thread.start()
