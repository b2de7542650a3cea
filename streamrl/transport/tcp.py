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
"""TCP_RTO_MAX_MS of Linux 6.15, which Python has no name for yet; 1,000 to 120,000."""
NUM_ATTEMPTS = 10
"""TCP ends a connection after 15 failed attempts, of which the first are closer together, and with a bound on the wait
it does so whatever TCP_USER_TIMEOUT says (Linux 6.18: after 14.8 s with 1 s, not within 30 s with 3 s)."""


def retry_soon(lasting_s: float) -> int:
    """Let every TCP socket of this process, those of libraries too, try at each tenth of a cut's longest time.

    What a listening socket accepts later inherits it. Returns how many sockets were changed: 0 on an older Linux.
    With 0 silence is not watched: then connections last as long as the system lets them.
    """
    if not lasting_s:
        return 0
    wait_ms = min(max(1_000, int(1000 * lasting_s / NUM_ATTEMPTS)), 120_000)
    names = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    return sum(_retry_soon(int(name), wait_ms) for name in names)


def _retry_soon(descriptor: int, wait_ms: int) -> bool:
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
        if is_tcp and one.getsockopt(socket.IPPROTO_TCP, RTO_MAX_MS) > wait_ms:
            one.setsockopt(socket.IPPROTO_TCP, RTO_MAX_MS, wait_ms)
            return True
    return False
