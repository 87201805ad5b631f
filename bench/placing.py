"""Place pods as kube-scheduler does: filter, prioritize, bind, one pod after the other.

Each pod is created through the backend. The extender is called over one kept-alive connection, and
the pod is bound to the node with the highest score, so that the cluster changes with each pod.
Latency is measured as kube-scheduler sees it: from the first byte sent to the last byte read. It
excludes building requests and parsing answers, which are kube-scheduler's own costs.
"""

import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from bench.requests import EVERYDAY, Wish, create_pod, names_json, request_body
from bench.world import BenchError, World
from extender.server.listener import replace_bbr

RECEIVE_BYTES: Final = 1 << 18
ANSWER_SECONDS: Final = 30.0


class Connection:
    """Kept-alive HTTP/1.1 connection with little Python overhead around the socket.

    Args:
        url: base URL of the server.
        tls: TLS configuration; None for plain HTTP.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        self._host = parts.netloc
        self._socket = socket.create_connection((parts.hostname, parts.port), ANSWER_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        replace_bbr(self._socket)  # Nagle's algorithm would add this machine's delay to the latency
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=parts.hostname)

    def post(self, path: str, body: bytes) -> tuple[float, bytes]:
        """Send a POST; return the seconds until the whole answer arrived, and its body.

        Raises:
            BenchError: the status was not 200, or the connection broke.
        """
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return self._exchange(head.encode() + body, path)

    def get(self, path: str) -> tuple[float, bytes]:
        """Send a GET; return the seconds until the whole answer arrived, and its body."""
        return self._exchange(f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode(), path)

    def close(self) -> None:
        """Close the connection."""
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
    """Result of placing one pod.

    Attributes:
        at: time of the filter call, by `time.perf_counter`.
        filter_seconds: latency of filter.
        prioritize_seconds: latency of prioritize; 0 if filter left no node.
        node: node to which it was bound; "" if no node was left.
        feasible: number of nodes in filter's answer.
    """

    at: float
    filter_seconds: float
    prioritize_seconds: float
    uid: str
    node: str
    feasible: int


@dataclass(slots=True)
class Scheduler:
    """Stand-in for kube-scheduler that calls the extender for one pod after the other.

    Attributes:
        world: the simulated cluster and the extender.
        wishes: GPU requests of its pods, used in turn.
        is_binding: whether it binds the pods.
        tls: TLS configuration; None for plain HTTP.
        placed: results of all pods so far.
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
        """Connect, and fetch the nodes' names."""
        self._connection = Connection(self.world.url, self.tls)
        self.world.connections.callback(self.close)
        self._names = names_json(self.world.nodes())

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def reconnect(self) -> None:
        """Open a new connection to the extender."""
        self.close()
        self._connection = Connection(self.world.url, self.tls)

    def prepare(self, count: int) -> None:
        """Create pods in advance for the next calls; more than a few hundred are not realistic."""
        for number in range(count):
            wish = self.wishes[(self._turn + number) % len(self.wishes)]
            self._pods.append(create_pod(self.world, wish))
        self._turn += count

    def place(self) -> Placed:
        """Place one pod; create it first if none was prepared."""
        if not self._pods:
            self.prepare(1)
        uid, pod = self._pods.pop(0)
        at = time.perf_counter()
        filter_seconds, answer = self._connection.post("/filter", request_body(pod, self._names))
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

    def place_for(self, seconds: float) -> list[Placed]:
        """Place pods one after the other for a time."""
        done: list[Placed] = []
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            done.append(self.place())
            time.sleep(0.005)  # for kube-scheduler's own work
        return done

    def remove(self, placed: Iterable[Placed]) -> None:
        """Delete placed pods."""
        self.world.control("delete", uids=[one.uid for one in placed])

    def _rank(self, pod: bytes, names: Sequence[str]) -> tuple[float, str]:
        seconds, answer = self._connection.post("/prioritize", request_body(pod, names_json(names)))
        scores: list[dict[str, Any]] = orjson.loads(answer)
        best = max(scores, key=lambda score: score["Score"])
        return seconds, best["Host"]


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of values by nearest rank; nan if there are none.

    Example:
        >>> percentile([5.0, 1.0, 3.0], 0.5)
        3.0
    """
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
