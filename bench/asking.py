"""Places pods as kube-scheduler does: filter, prioritize, bind, one pod after the other.

A pod is created through the backend, the extender is asked over one kept-alive connection, and the
pod is bound to the node of the highest score, so that the cluster changes as it goes. What is timed
is a question as kube-scheduler sees it: from the first byte sent to the last byte read. Building
questions and reading answers is not: kube-scheduler has its own costs for that.
"""

import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from bench.questions import EVERYDAY, Wish, create_pod, names_json, question
from bench.world import BenchError, World
from extender.server.listener import replace_bbr

RECEIVE_BYTES: Final = 1 << 18
ANSWER_SECONDS: Final = 30.0


class Connection:
    """One kept-alive HTTP/1.1 connection, as little Python as possible around the socket.

    Args:
        url: base URL of the server.
        tls: how it is asked over TLS; None for plain HTTP.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        self._host = parts.netloc
        self._socket = socket.create_connection((parts.hostname, parts.port), ANSWER_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        replace_bbr(self._socket)  # what this machine would hold back is no answer's time
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=parts.hostname)

    def post(self, path: str, body: bytes) -> tuple[float, bytes]:
        """Return the seconds until the whole answer was there, and its body.

        Raises:
            BenchError: the status was not 200, or the connection broke.
        """
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return self._exchange(head.encode() + body, path)

    def get(self, path: str) -> tuple[float, bytes]:
        """Ask with GET likewise."""
        return self._exchange(f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode(), path)

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def _exchange(self, message: bytes, path: str) -> tuple[float, bytes]:
        started = time.perf_counter()
        self._socket.sendall(message)
        answer = bytearray()
        while (end := answer.find(b"\r\n\r\n")) < 0:
            self._receive(answer, path)
        head = bytes(answer[:end]).lower()
        at = head.find(b"content-length:")
        if not head.startswith(b"http/1.1 200") or at < 0:
            raise BenchError(f"{path}: {bytes(answer[:300])!r}")
        length = end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])
        while len(answer) < length:
            self._receive(answer, path)
        return time.perf_counter() - started, bytes(answer[end + 4 :])

    def _receive(self, answer: bytearray, path: str) -> None:
        chunk = self._socket.recv(RECEIVE_BYTES)
        if not chunk:
            raise BenchError(f"{path}: the connection was closed")
        answer += chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """How one pod was placed.

    Attributes:
        at: when filter was asked, `time.perf_counter`.
        filter_seconds: how long filter took.
        prioritize_seconds: how long prioritize took; 0 where filter left no node.
        uid: the pod.
        node: where it was bound; "" where no node was left.
        feasible: nodes in filter's answer.
    """

    at: float
    filter_seconds: float
    prioritize_seconds: float
    uid: str
    node: str
    feasible: int


@dataclass(slots=True)
class Scheduler:
    """kube-scheduler, as far as extenders see it.

    Attributes:
        world: where it works.
        wishes: what its pods ask for, in turn.
        is_binding: bind what was placed.
        tls: how the extender is asked over TLS; None for plain HTTP.
        placed: what it has done.
    """

    world: World
    wishes: Sequence[Wish] = EVERYDAY
    is_binding: bool = True
    tls: ssl.SSLContext | None = None
    placed: list[Placed] = field(default_factory=list)
    _connection: Connection = field(init=False)
    _names: bytes = field(init=False)
    _pods: list[tuple[str, bytes]] = field(default_factory=list, init=False)
    _turn: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Connect, and learn the nodes' names."""
        self._connection = Connection(self.world.url, self.tls)
        self.world.connections.callback(self.close)
        self._names = names_json(self.world.nodes())

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def reconnect(self) -> None:
        """Ask over a new connection from now on."""
        self.close()
        self._connection = Connection(self.world.url, self.tls)

    def prepare(self, count: int) -> None:
        """Create pods that wait to be placed; at most a few hundred at a time are realistic."""
        for number in range(count):
            wish = self.wishes[(self._turn + number) % len(self.wishes)]
            self._pods.append(create_pod(self.world, wish))
        self._turn += count

    def place(self) -> Placed:
        """Place one pod; it is created first if none was prepared."""
        if not self._pods:
            self.prepare(1)
        uid, pod = self._pods.pop(0)
        at = time.perf_counter()
        filter_seconds, answer = self._connection.post("/filter", question(pod, self._names))
        passed = orjson.loads(answer)
        if passed.get("Error"):
            raise BenchError(f"filter: {passed['Error']}")
        names = passed["NodeNames"] or []
        prioritize_seconds, node = 0.0, ""
        if names:
            prioritize_seconds, node = self._rank(pod, names)
            if self.is_binding:
                self.world.control("bind", uid=uid, node=node)
        placed = Placed(
            at=at,
            filter_seconds=filter_seconds,
            prioritize_seconds=prioritize_seconds,
            uid=uid,
            node=node,
            feasible=len(names),
        )
        self.placed.append(placed)
        return placed

    def place_for(self, seconds: float, *, pause_seconds: float = 0.005) -> list[Placed]:
        """Place pods one after the other for so long.

        Args:
            seconds: how long.
            pause_seconds: what kube-scheduler itself needs for a pod.
        """
        done: list[Placed] = []
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            done.append(self.place())
            time.sleep(pause_seconds)
        return done

    def remove(self, placed: Iterable[Placed]) -> None:
        """Delete pods again."""
        self.world.control("delete", uids=[one.uid for one in placed])

    def _rank(self, pod: bytes, names: Sequence[str]) -> tuple[float, str]:
        seconds, answer = self._connection.post("/prioritize", question(pod, names_json(names)))
        scores: list[dict[str, Any]] = orjson.loads(answer)
        best = max(scores, key=lambda score: score["Score"])
        return seconds, best["Host"]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed; nan where there are none.

    Example:
        >>> percentile([5.0, 1.0, 3.0], 0.5)
        3.0
    """
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
