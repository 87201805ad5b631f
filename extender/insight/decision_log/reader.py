"""Read a decision log: rebuild each decision with its snapshot, settings and pods."""

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import numpy as np
import orjson

from extender.core.decision.evaluation import Overlay
from extender.core.decision.group_fit import GroupFit
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.node_index import NodeIndex
from extender.core.nodes.seen_requests import NONE_SEEN, RequestKind, SeenRequests
from extender.core.nodes.snapshot import (
    FLAGS,
    NO_DEVICE,
    PER_NODE,
    PER_SLOT,
    Batch,
    Leaving,
    Pool,
    PoolRow,
    Rows,
    Snapshot,
    Telemetry,
    Tenant,
)
from extender.core.policy import Policy, Strategy, Thresholds
from extender.core.request.annotations import Target, TargetPolicy
from extender.core.request.gpu_resources import Containers
from extender.core.request.request import GpuRequest, PodRef
from extender.core.untyped import mapping_of, text_of
from extender.insight.decision_log.lines import (
    TELEMETRY,
    VERSION,
    Column,
    RecordError,
    name_order,
    read_columns,
)
from extender.runtime.decoding import MalformedError, decode_with


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedDecision:
    """A decision from a log, with its inputs.

    Attributes:
        number: decision number within its process.
        at: time of the decision, seconds since the epoch.
        verb: filter or prioritize.
        mode: active or shadow.
        candidates: node names; sorted if the log does not preserve their order.
        snapshot: state of the fleet.
        overlays: tentative tenants by resource and node.
        best: best nodes and their scores, as logged.
        feasible: number of candidates that passed.
        digest: hash of the verdicts on all candidates.
        group: nearness of the candidates to the pod's group, None if it is in none.
    """

    number: int
    at: float
    verb: str
    mode: str
    pod: PodRef
    request: GpuRequest
    candidates: Sequence[str]
    snapshot: Snapshot
    overlays: Mapping[str, Overlay]
    policy: Policy
    best: tuple[tuple[str, float], ...]
    feasible: int
    digest: str
    group: GroupFit | None = None

    @property
    def node(self) -> str:
        """The first choice, "" if no node passed."""
        return self.best[0][0] if self.best else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedBinding:
    """A pod's binding by kube-scheduler."""

    uid: str
    node: str


Logged = LoggedDecision | LoggedBinding


def read_log(paths: Iterable[Path]) -> Iterator[Logged]:
    """Yield the decisions and bindings in log files, in order.

    Lines of other logs on the same standard output are skipped, and so is an incomplete last line.

    Raises:
        RecordError: a line cannot be decoded, or an earlier line that it needs is missing; the
            message names file and line.
        OSError: a file cannot be read.
    """
    for path in paths:
        with path.open("rb") as file:
            yield from read_lines(file, str(path))


def read_lines(file: IO[bytes], name: str) -> Iterator[Logged]:
    """Yield the decisions and bindings in one file; see `read_log`."""
    reader = _Reader()
    for number, text in enumerate(file, 1):
        try:
            document = decode_with(orjson.loads, text)
        except MalformedError as error:
            if not text.endswith(b"\n") or not text.lstrip().startswith(b'{"kind":'):
                continue
            raise RecordError(f"{name}:{number}: not JSON: {error}") from error
        line = mapping_of(document)
        if "kind" not in line or "version" not in line:
            continue
        try:
            logged = reader.take(line)
        except RecordError as error:
            raise RecordError(f"{name}:{number}: {error}") from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise RecordError(f"{name}:{number}: cannot be read: {error!r}") from error
        if logged is not None:
            yield logged


@dataclass(slots=True)
class _Reader:
    """State accumulated from the lines read so far.

    Attributes:
        snapshot: state of the fleet after the last line.
        fleets: number of `fleet` lines so far.
    """

    policy: Policy | None = None
    snapshot: Snapshot | None = None
    fleets: int = 0
    overlays: dict[str, Overlay] = field(default_factory=dict)

    def take(self, line: Mapping[str, object]) -> Logged | None:
        """Apply one line to the state; return its decision or binding, None for other kinds."""
        if line["version"] != VERSION:
            raise RecordError(
                f"version {line['version']!r} of the log cannot be read: must be {VERSION}"
            )
        match line["kind"]:
            case "settings":
                self.policy = msgspec.convert(line["policy"], Policy, strict=False)
            case "fleet":
                self.fleets += 1
                self.snapshot, self.overlays = _read_fleet(line, self.fleets), {}
            case "decision":
                return self._decision(line)
            case "bound":
                return LoggedBinding(uid=str(line["uid"]), node=str(line["node"]))
            case _:
                pass  # a newer writer's kind, which decisions do not need
        return None

    def _decision(self, line: Mapping[str, object]) -> LoggedDecision:
        if self.policy is None or self.snapshot is None:
            raise RecordError(
                "earlier lines that this decision needs are missing: read the file from its start"
            )
        self.snapshot = snapshot = _changed(self.snapshot, line)
        self.overlays = _read_overlays(self.overlays, mapping_of(line.get("overlay")))
        result, pod = mapping_of(line["result"]), mapping_of(line["pod"])
        best = result["best"]
        candidates = _read_candidates(line["candidates"], snapshot.node_index)
        return LoggedDecision(
            number=int(_number(line["number"])),
            at=_number(line["at"]),
            verb=str(line["verb"]),
            mode=str(line["mode"]),
            pod=PodRef(**{name: text_of(pod.get(name)) for name in ("uid", "namespace", "name")}),
            request=_read_request(mapping_of(line["request"])),
            candidates=candidates,
            snapshot=snapshot,
            overlays=self.overlays,
            policy=self.policy,
            best=tuple((str(node), float(score)) for node, score in _items(best)),
            feasible=int(_number(result["feasible"])),
            digest=str(result["digest"]),
            group=_read_group(mapping_of(line.get("group")), candidates),
        )


def _read_group(encoded: Mapping[str, object], candidates: Sequence[str]) -> GroupFit | None:
    """Read how near the candidates are to the pod's group; {} means that it is in none."""
    if not encoded:
        return None
    try:
        stored = base64.b64decode(text_of(encoded["ranks"]), validate=True)
    except binascii.Error as error:
        raise RecordError(f"the group cannot be read: {error}") from error
    if len(stored) != len(candidates):
        raise RecordError(f"the group has {len(stored)} of {len(candidates)} candidates")
    ranks = np.zeros(len(candidates), dtype=np.uint8)
    ranks[name_order(candidates)] = np.frombuffer(stored, np.uint8)
    units = tuple(map(_number, _items(encoded["units"])))
    few = encoded.get("too_few")
    return GroupFit(
        name="",
        size=0,
        placed={},
        rest=0,
        ranks=ranks,
        units=units,
        words=("",) * len(units),
        too_few=None if few is None else int(_number(few)),
    )


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise RecordError(f"{value!r} is not a number")
    return value


def _items(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise RecordError(f"{type(value).__name__} is not a list")
    return value


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(str, _items(value)))


def _whole(value: object) -> list[int]:
    return list(map(int, _items(value)))


def _read_fleet(line: Mapping[str, object], version: int) -> Snapshot:
    """Build a snapshot from a `fleet` line."""
    names = _names(line["nodes"])
    pools: dict[str, Pool] = {}
    parts: list[Telemetry] = []
    first = 0
    for resource, encoded in mapping_of(line["pools"]).items():
        described = mapping_of(encoded)
        nodes = tuple(names[place] for place in _whole(described["nodes"]))
        width = int(_number(described["width"]))
        columns = read_columns(mapping_of(described["columns"]), len(nodes), width)
        # Each pool has its own rows in the telemetry: one for each slot of each node.
        slots = first + np.arange(len(nodes) * width, dtype=np.intp).reshape(len(nodes), width)
        first += slots.size
        batch = _batch(columns, slots)
        pools[resource] = Pool(
            resource=resource,
            nodes=nodes,
            row_of={node: at for at, node in enumerate(nodes)},
            rows=_rows_of(batch, mapping_of(described.get("leaving")), range(len(nodes))),
            batch=batch,
            version=version,
            seen=_read_seen(described.get("seen")),
        )
        parts.append(Telemetry(**{name: columns[name].ravel() for name in TELEMETRY}))
    telemetry = Telemetry.missing(0)
    if parts:
        telemetry = Telemetry(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in TELEMETRY}
        )
    return Snapshot(
        version=version,
        at=_number(line["at"]),
        nodes=frozenset(names),
        pools=pools,
        telemetry=telemetry,
        models=_names(line["models"]),
        node_index=NodeIndex(names, {resource: pool.nodes for resource, pool in pools.items()}),
    )


def _read_seen(listed: object) -> SeenRequests:
    """Decode the requests seen before a decision."""
    if listed is None:
        return NONE_SEEN
    rows = msgspec.convert(listed, list[tuple[float, RequestKind]])
    return SeenRequests(
        kinds=tuple(kind for _, kind in rows), shares=tuple(share for share, _ in rows)
    )


def _batch(columns: Mapping[str, Column], slots: Rows) -> Batch:
    """Build a batch from decoded columns.

    Args:
        slots: telemetry row of each slot, also of absent devices.
    """
    present = columns["present"]
    return Batch(
        slots=np.asfortranarray(np.where(present, slots, NO_DEVICE)),
        present=present,
        telemetry=Telemetry(**{name: columns[name] for name in TELEMETRY}),
        **{name: columns[name] for name in ("suspicion", *PER_SLOT, *PER_NODE, *FLAGS)},
    )


def _rows_of(
    batch: Batch, leaving: Mapping[str, object], numbers: Iterable[int]
) -> tuple[PoolRow, ...]:
    """Convert a batch to single rows.

    Args:
        leaving: by row number, the node's state once its terminating pods are gone.
    """
    slotted = {name: getattr(batch, name).tolist() for name in ("slots", *PER_SLOT)}
    single = {name: getattr(batch, name).tolist() for name in (*PER_NODE, *FLAGS)}
    rows: list[PoolRow] = []
    for at, present in enumerate(batch.present.tolist()):
        devices = [slot for slot, is_there in enumerate(present) if is_there]
        values: dict[str, Any] = {
            name: tuple(column[at][slot] for slot in devices) for name, column in slotted.items()
        }
        rows.append(PoolRow(**values, **{name: column[at] for name, column in single.items()}))
    return tuple(
        replace(row, leaving=_read_leaving(row, leaving[str(number)]))
        if str(number) in leaving
        else row
        for row, number in zip(rows, numbers, strict=True)
    )


def _read_leaving(row: PoolRow, encoded: object) -> Leaving:
    """Decode a node's state without its terminating pods; device numbers are those of its row."""
    leaving = msgspec.convert(encoded, Leaving)
    return replace(leaving, row=replace(leaving.row, slots=row.slots))


def _changed(snapshot: Snapshot, line: Mapping[str, object]) -> Snapshot:
    """Return the snapshot with the rows that a line changes."""
    pools, telemetry = dict(snapshot.pools), snapshot.telemetry
    for resource, encoded in mapping_of(line.get("rows")).items():
        described, pool = mapping_of(encoded), pools[resource]
        rows = np.array(_whole(described["rows"]), dtype=np.intp)
        width = pool.batch.slots.shape[1]
        columns = read_columns(mapping_of(described["columns"]), len(rows), width)
        first = _first_slot(snapshot, resource)
        slots = first + rows[:, None] * width + np.arange(width, dtype=np.intp)
        fresh = _batch(columns, slots)
        telemetry = telemetry.with_rows(
            slots.ravel(), Telemetry(**{name: columns[name].ravel() for name in TELEMETRY})
        )
        pool_rows = list(pool.rows)
        for at, row in zip(
            rows.tolist(),
            _rows_of(fresh, mapping_of(described.get("leaving")), rows.tolist()),
            strict=True,
        ):
            pool_rows[at] = row
        # As in a live snapshot: dirty rows are evaluated from the values written here.
        pools[resource] = replace(
            pool,
            rows=tuple(pool_rows),
            dirty=(*pool.dirty, *rows.tolist()),
            estimated=(*pool.estimated, *rows.tolist()),
        )
    models = _names(line["models"]) if "models" in line else snapshot.models
    return replace(snapshot, pools=pools, telemetry=telemetry, models=models)


def _first_slot(snapshot: Snapshot, resource: str) -> int:
    """Return the first telemetry row of a pool."""
    first = 0
    for name, pool in snapshot.pools.items():
        if name == resource:
            break
        first += pool.batch.slots.size
    return first


def _read_overlays(
    before: Mapping[str, Overlay], changes: Mapping[str, object]
) -> dict[str, Overlay]:
    """Apply a line's changes to the tentative tenants."""
    overlays = dict(before)
    for resource, by_node in changes.items():
        nodes = dict(overlays.get(resource, {}))
        for node, tenants in mapping_of(by_node).items():
            nodes[node] = tuple(_read_tenant(*values) for values in _items(tenants))
            if not nodes[node]:
                del nodes[node]
        overlays[resource] = nodes
    return {resource: nodes for resource, nodes in overlays.items() if nodes}


def _read_tenant(count: int, memory: int | None, expected: int | None = None, *host: int) -> Tenant:
    return Tenant(
        uid="",
        count=int(count),
        memory_bytes=memory,
        expected_bytes=expected,
        host=HostResources(*map(int, host)),
    )


_TARGET: Final = [column.name for column in fields(Target)]


def _read_request(encoded: Mapping[str, object]) -> GpuRequest:
    resources = tuple((str(name), int(count)) for name, count in _items(encoded["resources"]))
    memory, expected = encoded["memory_bytes"], encoded.get("expected_bytes")
    return GpuRequest(
        resource=resources[0][0],
        count=resources[0][1],
        resources=resources,
        containers=msgspec.convert(encoded.get("containers", ()), Containers),
        memory_bytes=None if memory is None else int(_number(memory)),
        memory_share=float(_number(encoded.get("memory_share", 0))),
        expected_bytes=None if expected is None else int(_number(expected)),
        requires_idle=bool(encoded["requires_idle"]),
        thresholds=msgspec.convert(encoded["thresholds"], Thresholds, strict=False),
        strategy=Strategy(text_of(encoded["strategy"])),
        preferred_models=_names(encoded["preferred_models"]),
        # Older logs lack these, because no pod could ask for them.
        required_models=_names(encoded.get("required_models", [])),
        targets=msgspec.convert(
            [dict(zip(_TARGET, each, strict=True)) for each in _items(encoded.get("targets", []))],
            tuple[Target, ...],
        ),
        target_policy=TargetPolicy(text_of(encoded.get("target_policy")) or TargetPolicy.REQUIRE),
        # Older logs lack CPU, memory and storage, which did not count then.
        millicores=int(_number(encoded.get("millicores", 0))),
        host_bytes=int(_number(encoded.get("host_bytes", 0))),
        storage_bytes=int(_number(encoded.get("storage_bytes", 0))),
        nominated_node=text_of(encoded["nominated_node"]),
        avoided={
            node: _number(share) for node, share in mapping_of(encoded.get("avoided")).items()
        },
        own=frozenset(_names(encoded["own"])),
    )


def _read_candidates(encoded: object, node_index: NodeIndex) -> Sequence[str]:
    if encoded == "all":
        return node_index.number(node_index.names)
    if isinstance(encoded, Mapping):
        try:
            packed = base64.b64decode(text_of(encoded["bits"]), validate=True)
        except binascii.Error as error:
            raise RecordError(f"candidates cannot be read: {error}") from error
        bits = np.unpackbits(np.frombuffer(packed, np.uint8))[: len(node_index.names)]
        return node_index.number([node_index.names[at] for at in np.flatnonzero(bits).tolist()])
    return _names(encoded)
