"""File descriptors that another process of this host gives away over a Unix socket."""

import array
import socket


def receive_fds(sock: socket.socket, num_bytes: int, max_fds: int) -> tuple[bytes, list[int]]:
    """Waits for a message of at most `num_bytes` and the descriptors that come with it, which the caller closes.

    A process started meanwhile has none of them; `socket.recv_fds` lets it inherit them, whatever flags it is given
    (python/cpython 3.11 does not pass them on). Descriptors beyond `max_fds` are closed by the kernel. Raises OSError.
    """
    fds = array.array("i")
    message, ancillary, _, _ = sock.recvmsg(num_bytes, socket.CMSG_LEN(max_fds * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return message, list(fds)
