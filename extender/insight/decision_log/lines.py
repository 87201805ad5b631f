"""Encode decisions as JSON lines: the whole fleet once, then only its changes.

A line omits what the lines before it state, back to the last `fleet` line. Every file begins with
the full state that its decisions need. NumPy columns are encoded without loss: a constant column as
one number, a short column as a list, and any other column as zlib-compressed bytes.
"""

import base64
import binascii
import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, fields
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from extender.core.decision.decision import Decision
from extender.core.decision.evaluation import Overlay
from extender.core.nodes.batches import current_batch
from extender.core.nodes.host_resources import NONE
from extender.core.nodes.node_index import NodeIndex
from extender.core.nodes.node_names import NamesAt
from extender.core.nodes.snapshot import (
    BYTES_PER_SLOT,
    FLAGS,
    NO_LIMIT,
    NO_PRICE,
    PER_NODE,
    PER_SLOT,
    Batch,
    Pool,
    Rows,
    Snapshot,
    Telemetry,
    Tenant,
    batch_rows,
)
from extender.core.policy import Policy
from extender.core.request.request import GpuRequest
from extender.placement.history import DecisionRecord
from extender.placement.placer import Weighed

Column = npt.NDArray[Any]

VERSION: Final = 1
"""Format version of all lines; it grows when an older reader would misread them."""

_FEW: Final = 64
"""Largest number of values to write as a plain list."""

_FAST: Final = 1
"""zlib level: the fleet is written often and rarely read, so speed matters more than size."""

TELEMETRY: Final = tuple(column.name for column in fields(Telemetry))
_OF_SLOTS: Final = ("present", *PER_SLOT, *TELEMETRY)
"""Columns with one value for each device slot; all others have one value for each node."""
_COLUMNS: Final = (*_OF_SLOTS, "suspicion", *PER_NODE, *FLAGS)
_LATER: Final[Mapping[str, object]] = {
    "is_out": False,
    "loading": 0,
    "presumed": 0.0,
    "others_bytes": 0.0,
    "foreign_bytes": 0.0,
    "guessed_bytes": 0.0,
    "just_freed": 0,
    "is_presumed": False,
    "zone_id": 0,
    "price": NO_PRICE,
    "joined": 0,
    "numa": 0,
    "alignment": 0,
    "free_millicores": NO_LIMIT,
    "free_bytes": NO_LIMIT,
    "free_storage_bytes": NO_LIMIT,
}
"""Columns that older logs lack, with the value that decisions used at that time."""
_FORMER: Final[Mapping[str, str]] = {"declared_bytes": "assumed_bytes"}
"""Former names of columns in older logs. `assumed_bytes` counted declared memory only while it was
not yet in use."""

_PEAK_OF: Final = ("utilization", "latest")
"""Columns whose maximum replaces `peak` in logs that lack it. Such logs and somewhat later ones
lack `next_hour`: their decisions used the root mean square of the hour."""

_Json = dict[str, object]

BEST: Final = 10
"""Number of best nodes written with their scores; all other verdicts are covered by a digest."""

_OPTIONS: Final = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS


class RecordError(ValueError):
    """A line of a decision log cannot be decoded; the message says why."""


def _write_columns(batch: Batch, rest: Callable[[], None] = lambda: None) -> dict[str, object]:
    """Encode a batch as columns for orjson; `slots` is omitted, as it follows from `present`.

    Args:
        rest: callback after each column that was compressed, to yield the processor.
    """
    columns: dict[str, object] = {}
    for name in _COLUMNS:
        columns[name] = encoded = _write(_column_of(batch, name))
        if isinstance(encoded, orjson.Fragment):
            rest()
    return columns


def read_columns(written: Mapping[str, object], nodes: int, width: int) -> dict[str, Column]:
    """Decode the columns of a batch.

    Args:
        written: encoded columns by name.
        nodes: number of rows.
        width: device slots of each row.

    Raises:
        RecordError: a column is missing, malformed or of another size.
    """
    blank = {"present": np.bool_, "suspicion": np.float64} | dict.fromkeys(FLAGS, np.bool_)
    kinds = blank | {name: getattr(Telemetry.missing(0), name).dtype.type for name in TELEMETRY}
    columns: dict[str, Column] = {}
    for name in _COLUMNS:
        kind = kinds.get(name, np.float64 if name in BYTES_PER_SLOT else np.intp)
        shape = (nodes, width) if name in _OF_SLOTS else (nodes,)
        try:
            if name == "peak" and name not in written:
                column = np.maximum(*(columns[other] for other in _PEAK_OF))
            elif name == "next_hour" and name not in written:
                spread = _read(written["spread"], shape, kind)
                column = np.minimum(np.hypot(columns["utilization"], spread), 1.0)
            else:
                column = _read(_find(written, name), shape, kind)
        except (KeyError, ValueError, TypeError, zlib.error, binascii.Error) as error:
            raise RecordError(f"column {name!r} cannot be read: {error!r}") from error
        columns[name] = np.asfortranarray(column)
    return columns


def _find(written: Mapping[str, object], name: str) -> object:
    """Return an encoded column under its present or former name, else its default.

    Raises:
        KeyError: the column is missing and has no default.
    """
    for known in (name, _FORMER.get(name, name)):
        if known in written:
            return written[known]
    return _LATER[name]


def _column_of(batch: Batch, name: str) -> Column:
    column: Column = getattr(batch.telemetry if name in TELEMETRY else batch, name)
    return column


def _write(column: Column) -> object:
    """Encode one column, row by row."""
    flat = column.ravel()
    if not flat.size:
        return []
    if (flat == flat[0]).all():
        return flat[0].item()
    if flat.size <= _FEW:
        return flat.tolist()
    small = _small(flat)
    raw = small.astype(small.dtype.newbyteorder("<")).tobytes()
    packed = base64.b64encode(zlib.compress(raw, _FAST))
    # A Fragment is copied verbatim: base64 needs no escaping.
    return orjson.Fragment(b'{"type":"%b","zlib":"%b"}' % (small.dtype.str[1:].encode(), packed))


def _small(flat: Column) -> Column:
    """Convert integers to the smallest type that fits; leave floats exact."""
    if flat.dtype.kind == "i":
        for kind in (np.int8, np.int16, np.int32):
            limits = np.iinfo(kind)
            if limits.min <= int(flat.min()) and int(flat.max()) <= limits.max:
                return flat.astype(kind)
    return flat


def _read(written: object, shape: tuple[int, ...], kind: type[np.generic]) -> Column:
    """Decode one column."""
    if isinstance(written, Mapping):
        raw = zlib.decompress(base64.b64decode(written["zlib"], validate=True))
        return np.frombuffer(raw, np.dtype("<" + str(written["type"]))).astype(kind).reshape(shape)
    if isinstance(written, list):
        return np.array(written, dtype=kind).reshape(shape)
    if not isinstance(written, int | float):
        raise ValueError(f"{written!r} is not a column")  # noqa: TRY004 - of a document
    return np.full(shape, written, dtype=kind)


class LineWriter:
    """Builds the lines of one file after another. Not thread-safe.

    Args:
        rest: callback to yield the processor, called repeatedly while a large fleet is written.
    """

    def __init__(self, rest: Callable[[], None] = lambda: None) -> None:
        self._rest = rest
        self._fleets = 0
        self.begin()

    def begin(self) -> None:
        """Start a new file: the next line repeats the whole state."""
        self._policy: Policy | None = None
        self._node_index: NodeIndex | None = None
        self._models: tuple[str, ...] = ()
        self._pools: dict[str, tuple[int, int]] = {}
        self._overlays: dict[str, Overlay] = {}

    def decision(self, record: DecisionRecord, weighed: Weighed) -> list[bytes]:
        """Return the lines for a decision, preceded by the state that the file lacks.

        Args:
            record: the decision; fields that are filled in later are not written.
            weighed: inputs of the decision.
        """
        lines: list[_Json] = []
        if weighed.policy != self._policy:
            self._policy = weighed.policy
            lines.append({"kind": "settings", "version": VERSION, "policy": _policy(self._policy)})
        snapshot = weighed.snapshot
        if not self._is_based_on(snapshot):
            lines.append(self._fleet(snapshot))
        decision, request = weighed.decision, weighed.request
        line: _Json = {
            "kind": "decision",
            "version": VERSION,
            "number": record.number,
            "at": record.at,
            "verb": record.verb,
            "mode": "shadow" if record.is_shadow else "active",
            "pod": asdict(record.pod),
            "request": _request(request),
            "candidates": _candidates(decision.candidates, snapshot.node_index),
            "result": _result(decision),
            "seconds": round(record.seconds, 6),
            **_group(decision),
        }
        changes = {
            "rows": self._changed_rows(snapshot),
            "overlay": self._changed_overlay(weighed.overlays),
            "models": self._changed_models(snapshot),
        }
        lines.append(line | {name: change for name, change in changes.items() if change})
        return [orjson.dumps(line, option=_OPTIONS) for line in lines]

    def bound(self, uid: str, node: str, at: float) -> list[bytes]:
        """Return the lines for a pod's binding to a node."""
        line = {"kind": "bound", "version": VERSION, "at": at, "uid": uid, "node": node}
        return [orjson.dumps(line, option=_OPTIONS)]

    def _is_based_on(self, snapshot: Snapshot) -> bool:
        """Check whether a snapshot differs from the last written fleet only in dirty rows."""
        return (
            snapshot.node_index is self._node_index
            and snapshot.pools.keys() == self._pools.keys()
            and all(
                self._pools[resource][0] == pool.version
                and self._pools[resource][1] <= len(pool.dirty)
                for resource, pool in snapshot.pools.items()
            )
        )

    def _fleet(self, snapshot: Snapshot) -> _Json:
        """Build the line that states the whole fleet."""
        self._fleets += 1
        self._node_index, self._models = snapshot.node_index, snapshot.models
        self._overlays = {}
        self._pools = {
            resource: (pool.version, len(pool.dirty)) for resource, pool in snapshot.pools.items()
        }
        place = {name: number for number, name in enumerate(snapshot.node_index.names)}
        self._rest()
        names = orjson.Fragment(orjson.dumps(snapshot.node_index.names))
        self._rest()
        return {
            "kind": "fleet",
            "version": VERSION,
            "number": self._fleets,
            "at": snapshot.at,
            "models": snapshot.models,
            "nodes": names,
            "pools": {
                resource: {
                    "nodes": [place[name] for name in pool.nodes],
                    "width": int(pool.batch.slots.shape[1]),
                    "columns": _write_columns(current_batch(pool, snapshot.telemetry), self._rest),
                    **_leaving(pool, range(len(pool.rows))),
                    **_seen(pool),
                }
                for resource, pool in snapshot.pools.items()
            },
        }

    def _changed_rows(self, snapshot: Snapshot) -> _Json:
        """Return, by resource, the rows changed since they were last written."""
        return {
            resource: changed
            for resource, pool in snapshot.pools.items()
            if (changed := self._changed_of(resource, pool, snapshot)) is not None
        }

    def _changed_of(self, resource: str, pool: Pool, snapshot: Snapshot) -> _Json | None:
        version, written = self._pools[resource]
        rows = sorted(set(pool.dirty[written:]))
        if not rows:
            return None
        self._pools[resource] = (version, len(pool.dirty))
        batch = batch_rows(
            tuple(pool.rows[row] for row in rows),
            snapshot.telemetry,
            pool.batch.suspicion[np.array(rows, dtype=np.intp)],
            width=pool.batch.slots.shape[1],
        )
        return {"rows": rows, "columns": _write_columns(batch), **_leaving(pool, rows)}

    def _changed_models(self, snapshot: Snapshot) -> Sequence[str]:
        if snapshot.models == self._models:
            return ()
        self._models = snapshot.models
        return snapshot.models

    def _changed_overlay(self, overlays: Mapping[str, Overlay]) -> _Json:
        """Return, by resource and node, the tentative tenants that changed since the last line."""
        before, self._overlays = self._overlays, dict(overlays)
        changes: _Json = {}
        for resource in before.keys() | overlays.keys():
            was, now = before.get(resource, {}), overlays.get(resource, {})
            changed = {
                node: [_tenant(tenant) for tenant in now.get(node, ())]
                for node in was.keys() | now.keys()
                if was.get(node) is not now.get(node) and was.get(node) != now.get(node)
            }
            if changed:
                changes[resource] = changed
        return changes


def _tenant(tenant: Tenant) -> tuple[int | None, ...]:
    values = tenant.count, tenant.memory_bytes
    if tenant.host != NONE:
        return (*values, tenant.expected_bytes, *tenant.host)
    return values if tenant.expected_bytes is None else (*values, tenant.expected_bytes)


def _leaving(pool: Pool, rows: Iterable[int]) -> _Json:
    """Return the state of nodes once their terminating pods are gone, if there are any."""
    found = {str(row): leaving for row in rows if (leaving := pool.rows[row].leaving) is not None}
    return {"leaving": found} if found else {}


def name_order(names: Sequence[str]) -> Rows:
    """Return the indexes of candidates in the order of their names."""
    if isinstance(names, NamesAt):  # node numbers are in the order of names
        return np.argsort(names.rows, kind="stable")
    return np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.intp)


def _group(decision: Decision) -> _Json:
    """Encode how near the candidates are to the pod's group, in the order of their names."""
    group = decision.group
    if group is None:
        return {}
    ranks = group.ranks[name_order(decision.candidates)]
    return {
        "group": {
            "ranks": base64.b64encode(ranks.tobytes()).decode(),
            "units": group.units,
            "too_few": group.too_few,
        }
    }


def _seen(pool: Pool) -> _Json:
    """Return the requests seen so far with their shares, if there are any."""
    seen = pool.seen
    listed = [(share, asdict(kind)) for kind, share in zip(seen.kinds, seen.shares, strict=True)]
    return {"seen": listed} if listed else {}


def digest(names: Sequence[str], decision: Decision) -> str:
    """Hash the verdicts on all candidates, independently of the candidates' order.

    Args:
        names: candidate nodes.
        decision: codes and full-precision scores, in the order of `names`.
    """
    order = name_order(names)
    hashed = hashlib.blake2b(digest_size=8)
    hashed.update(np.ascontiguousarray(decision.codes[order], dtype="<u1").tobytes())
    hashed.update(np.ascontiguousarray(decision.scores[order], dtype="<f8").tobytes())
    return hashed.hexdigest()


def _policy(policy: Policy) -> orjson.Fragment:
    return orjson.Fragment(msgspec.json.encode(policy, enc_hook=_plain))


def _plain(value: object) -> object:
    """Convert a read-only mapping to a dict for the JSON encoder."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


def _request(request: GpuRequest) -> _Json:
    return {
        "resources": request.resources,
        "containers": [(name, [tuple(one) for one in some]) for name, some in request.containers],
        "memory_bytes": request.memory_bytes,
        "memory_share": request.memory_share,
        "expected_bytes": request.expected_bytes,
        "requires_idle": request.requires_idle,
        "thresholds": asdict(request.thresholds),
        "strategy": request.strategy.value,
        "preferred_models": request.preferred_models,
        "required_models": request.required_models,
        "targets": [astuple(target) for target in request.targets],
        "target_policy": request.target_policy.value,
        "millicores": request.millicores,
        "host_bytes": request.host_bytes,
        "storage_bytes": request.storage_bytes,
        "nominated_node": request.nominated_node,
        "avoided": request.avoided,
        "own": sorted(request.own),
    }


def _candidates(names: Sequence[str], node_index: NodeIndex) -> object:
    """Encode the candidates as a bit per node of the fleet, or as names if some are unknown."""
    if not (isinstance(names, NamesAt) and names.names is node_index.names):
        return list(names)
    if len(names) == len(node_index.names):
        return "all"
    among = np.zeros(len(node_index.names), dtype=np.bool_)
    among[names.rows] = True
    return {"bits": base64.b64encode(np.packbits(among).tobytes()).decode()}


def _result(decision: Decision) -> _Json:
    """Encode the verdicts of the best nodes in full, and a digest of all verdicts."""
    best = decision.order[:BEST].tolist()
    codes = np.bincount(decision.codes)
    return {
        "feasible": decision.feasible,
        "best": [(decision.candidates[at], float(decision.scores[at])) for at in best],
        "rejections": {code: int(codes[code]) for code in np.flatnonzero(codes).tolist() if code},
        "digest": digest(decision.candidates, decision),
    }
