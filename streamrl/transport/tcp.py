"""TCP connections that go on soon after a network that was cut is back.

TCP waits twice as long before each further attempt: after 30 s without a network the next one may be 20 s away. Sockets
of ZeroMQ can connect again, those of a process group cannot. Linux 6.15 lets a socket bound that wait.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

RTO_MAX_MS = 44
"""TCP_RTO_MAX_MS of Linux 6.15, which Python has no name for yet; 1,000 is the least it takes."""
RETRY_MS = 1000


def retry_soon(give_up_s: float) -> int:
    """Let every TCP socket of this process, those of libraries too, try each second and give up after `give_up_s`.

    What a listening socket accepts later inherits both. Returns how many sockets were changed: 0 on an older Linux.
    """
    names = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    return sum(_retry_soon(int(name), give_up_s) for name in names)


def _retry_soon(descriptor: int, give_up_s: float) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        copy = os.dup(descriptor)  # its owner may close it at any time
    except OSError:
        return False
    try:
        one = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return False
    with one, suppress(OSError):  # a kernel that does not know the option
        is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
        if is_tcp and one.getsockopt(socket.IPPROTO_TCP, RTO_MAX_MS) > RETRY_MS:
            # First: with a short wait the number of attempts that TCP allows is used up within 15 s.
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * give_up_s))
            one.setsockopt(socket.IPPROTO_TCP, RTO_MAX_MS, RETRY_MS)
            return True
    return False
