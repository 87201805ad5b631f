"""Answers that go out at once, whatever congestion control the machine has by default.

BBR spreads what is sent over time, at the rate that it has seen a connection carry. It takes the
pauses of kube-scheduler's connection for what that can carry: between two questions nothing is
sent, and the end of an answer is acknowledged late. So it held up one answer of fifty with 5,000
names by 15 to 50 milliseconds. Of what is not paced a machine's kernel has one at least.
"""

import contextlib
import socket
from typing import Final

PACED: Final = "bbr"
UNPACED: Final = ("cubic", "reno")
"""The first that the kernel has is used; the second is in all of them."""
_NAME_BYTES: Final = 16  # TCP_CA_NAME_MAX


def unpace(one: socket.socket) -> None:
    """Have what is sent on a connection, or on all that a port will accept, go out at once.

    Where that cannot be had, it remains as it is: a matter of milliseconds.
    """
    if not congestion_control(one).startswith(PACED):
        return
    for name in UNPACED:
        with contextlib.suppress(OSError):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            return


def congestion_control(one: socket.socket) -> str:
    """Return the name of a socket's congestion control, "" where the system does not tell."""
    try:
        name = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    except OSError:
        return ""
    return name.rstrip(b"\0").decode()
