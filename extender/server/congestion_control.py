"""Avoid BBR on sockets, because BBR delays answers on connections that are often idle.

BBR paces packets at the rate that it has measured on a connection. A connection of kube-scheduler
is idle between two requests, and the end of an answer is acknowledged late, so BBR measures too low
a rate. It delayed one of fifty answers with 5,000 names by 15 to 50 milliseconds. Every kernel has
at least one algorithm without pacing.
"""

import contextlib
import socket
from typing import Final

PACED: Final = "bbr"
UNPACED: Final = ("cubic", "reno")
"""Algorithms without pacing, tried in this order; every kernel has reno."""
_NAME_BYTES: Final = 16  # TCP_CA_NAME_MAX


def unpace(one: socket.socket) -> None:
    """Replace BBR on a socket, or on all connections that a listening socket will accept.

    If no other algorithm is available BBR stays, which costs only milliseconds.
    """
    if not congestion_control(one).startswith(PACED):
        return
    for name in UNPACED:
        with contextlib.suppress(OSError):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            return


def congestion_control(one: socket.socket) -> str:
    """Return the name of a socket's congestion control, or "" if the system does not report it."""
    try:
        name = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    except OSError:
        return ""
    return name.rstrip(b"\0").decode()
