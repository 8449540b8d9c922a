"""What a process of this host is given goes to no third one."""

import os
import socket
import subprocess
import sys

import pytest

from services.runtime.descriptors import receive_fds

LIST_FDS = "import os; print(*os.listdir('/proc/self/fd'))"


def test_what_was_received_is_inherited_by_no_child() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open("/dev/null", "rb") as file:
        socket.send_fds(ours, [b"here"], [file.fileno()])
        message, (received,) = receive_fds(theirs, 10, 1)
    assert message == b"here"
    os.dup2(received, 200, inheritable=True)
    there = subprocess.run(
        [sys.executable, "-c", LIST_FDS], stdout=subprocess.PIPE, text=True, close_fds=False, check=True
    )
    assert "200" in there.stdout.split()
    assert str(received) not in there.stdout.split()
    os.close(received)
    os.close(200)


@pytest.mark.parametrize("num_sent", [0, 3])
def test_as_many_come_as_were_asked_for_at_most(num_sent: int) -> None:
    ours, theirs = socket.socketpair()
    num_open = len(os.listdir("/proc/self/fd"))
    with open("/dev/null", "rb") as file:
        socket.send_fds(ours, [b"here"], [file.fileno()] * num_sent)
        message, received = receive_fds(theirs, 10, 2)
    assert (message, len(received)) == (b"here", min(num_sent, 2))
    for fd in received:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == num_open
    ours.close()
    assert receive_fds(theirs, 10, 2) == (b"", [])
    theirs.close()
