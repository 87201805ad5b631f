"""Ports for servers that run at the same time."""

import subprocess
import sys

from testkit.controlplane import process

TAKERS = 4
EACH = 8


def test_no_two_callers_get_the_same_port() -> None:
    wanted = (
        "from testkit.controlplane import process\n"
        f"process.PORTS = range(19_000, 19_000 + {TAKERS * EACH * 2})\n"
        f"print(*[process.free_port() for _ in range({EACH})], flush=True)\n"
        "input()\n"  # keeps its port until its input ends
    )
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", wanted], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(TAKERS)
    ]
    given: list[str] = []
    for taker in takers:
        assert taker.stdout is not None
        given += taker.stdout.readline().split()
    for taker in takers:
        taker.communicate("\n")

    assert len(given) == TAKERS * EACH
    assert len(set(given)) == len(given)


def test_a_port_is_never_given_twice() -> None:
    given = [process.free_port() for _ in range(50)]

    assert len(set(given)) == len(given)
