"""Check that dcgm-exporter exports the fields that decisions need, for every GPU."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from extender.cli.doctor.facts import NODE_LABELS, Facts, Object, key_of, some
from extender.cli.doctor.findings import Problem, Severity, check
from extender.core.untyped import mapping_of, text_of

_COUNTERS: Final = "the counters of manifests/examples/settings/dcgm-exporter.yaml"

_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "GPU utilization": (
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_GPU_UTIL_RATIO",
        "dcgm_gpu_utilization",
    ),
    "graphics engine activity": (
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO",
        "dcgm_fi_prof_gr_engine_active",
    ),
    "memory used": ("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_USED_BYTES", "dcgm_fb_used"),
    "memory free": ("DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_FREE_BYTES", "dcgm_fb_free"),
    "tensor core activity": (
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "DCGM_FI_PROF_TENSOR_UTIL_RATIO",
        "dcgm_fi_prof_pipe_tensor_active",
    ),
    "memory interface activity": (
        "DCGM_FI_PROF_DRAM_ACTIVE",
        "DCGM_FI_PROF_DRAM_UTIL_RATIO",
        "dcgm_fi_prof_dram_active",
    ),
    "SM activity": (
        "DCGM_FI_PROF_SM_ACTIVE",
        "DCGM_FI_PROF_SM_UTIL_RATIO",
        "dcgm_fi_prof_sm_active",
    ),
}
"""Metric names of the fields that decisions need, in all releases; the remedy names the first."""
UTILIZATION, ENGINE, USED, FREE = tuple(_FIELDS)[:4]
_SHARPER: Final = frozenset({"SM activity"})
"""Optional fields: dcgm-exporter's default counters omit them, and decisions work without them."""

_XIDS: Final = (
    "DCGM_FI_DEV_XID_ERRORS",
    "DCGM_FI_DEV_XID_ERROR",
    "DCGM_EXP_XID_ERRORS_COUNT",
    "dcgm_xid_errors",
)
"""Metric names of XID errors. Since release 4.8.2 a GPU without errors has no such series, so only
the counters file shows whether they are exported."""

_COUNTER: Final = re.compile(r"^\s*(DCGM_(?:FI|EXP)_[A-Z0-9_]+)\s*,", re.MULTILINE)


@dataclass(slots=True)
class _Card:
    """Series that exporters export for one card.

    Attributes:
        names: metric names of the card and its MIG instances.
        has_instances: whether the card has MIG instances.
    """

    names: set[str] = field(default_factory=set)
    has_instances: bool = False

    @property
    def absent(self) -> tuple[str, ...]:
        """Fields that are not exported; GPU utilization is not expected of MIG instances."""
        return tuple(
            name
            for name, known in _FIELDS.items()
            if not self.names.intersection(known)
            and not (self.has_instances and name == UTILIZATION and self._has(ENGINE))
        )

    def _has(self, name: str) -> bool:
        return bool(self.names.intersection(_FIELDS[name]))

    @property
    def is_blind(self) -> bool:
        """Whether no activity or no memory is exported at all."""
        has_activity = self._has(ENGINE) or (self._has(UTILIZATION) and not self.has_instances)
        return not has_activity or not self._has(USED)


@check("IG101", "dcgm-exporter exports the fields that decisions need", needs=("exporter|devices",))
def _not_exported(facts: Facts) -> Iterator[Problem]:
    """Find DCGM fields that dcgm-exporter does not export, card by card.

    A card without any activity or memory field is an error, and so is a MIG card without graphics
    engine activity. Disabled profiling fields of the default counters are a warning. If a node's
    exporter was not read, the check uses the fields that the extender lacks. A counters file
    without XIDs is a warning; series cannot show this, because from dcgm-exporter 4.8.2 on a GPU
    without errors has no series.

    Remedy: add the lines that the finding shows to the counters file.
    """
    cards = _cards(facts)
    lacking = {card: seen for card, seen in cards.items() if set(seen.absent) - _SHARPER}
    if lacking:
        yield _not_scraped(cards, lacking)
    reported = {node for node, _ in lacking}
    yield from _not_read(
        device for device in facts.devices or () if device.get("node") not in reported
    )
    yield from _not_counted(facts)


def _cards(facts: Facts) -> Mapping[tuple[str, str], _Card]:
    """Group the scraped series into cards, by node and UUID."""
    cards: defaultdict[tuple[str, str], _Card] = defaultdict(_Card)
    for sample in facts.exporter or ():
        uuid = sample.labels.get("UUID") or sample.labels.get("uuid", "")
        if not uuid:
            continue
        node = next(filter(None, map(sample.labels.get, NODE_LABELS)), "")
        card = cards[node, uuid]
        card.names.add(sample.name)
        card.has_instances |= bool(sample.labels.get("GPU_I_ID"))
    if facts.exporter and not cards:
        cards["", ""].names.update(sample.name for sample in facts.exporter)
    return cards


def _not_scraped(
    cards: Mapping[tuple[str, str], _Card], lacking: Mapping[tuple[str, str], _Card]
) -> Problem:
    absent = [name for name in _FIELDS if any(name in card.absent for card in lacking.values())]
    evidence = []
    for name in absent:
        those = [card for card, seen in lacking.items() if name in seen.absent]
        nodes = sorted({node or "?" for node, _ in those})
        where = "" if len(those) == len(cards) else f": {len(those)} GPUs of {some(nodes)}"
        evidence.append(f"not exported: {name} ({' or '.join(_FIELDS[name])}){where}")
    if any(card.has_instances and ENGINE in card.absent for card in lacking.values()):
        evidence.append("there are MIG instances, which have no other activity field")
    series = {name for card in lacking.values() for name in card.names}
    there = sorted(name for name in series if name.lower().startswith("dcgm_fi_"))
    return Problem(
        severity=Severity.ERROR
        if any(card.is_blind for card in lacking.values())
        else Severity.WARNING,
        what="dcgm-exporter does not export fields that decisions need",
        evidence=(*evidence, f"exported: {some(there) or 'no field of DCGM'}"),
        remedy="add the lines "
        + "; ".join(f'"{_FIELDS[name][0]}, gauge, {name}"' for name in absent)
        + f" to dcgm-exporter's counters ({_COUNTERS}); profiling fields need "
        "securityContext.capabilities.add: [SYS_ADMIN]",
    )


def _not_read(devices: Iterable[Object]) -> Iterator[Problem]:
    """Find GPUs for which the extender has readings without activity or without memory."""
    lacking: defaultdict[str, list[str]] = defaultdict(list)
    for device in devices:
        if device.get("freshness") != "fresh" or not device.get("uuid"):
            continue
        for value, name in (("utilization_ratio", "activity"), ("memory_used_ratio", "memory")):
            if device.get(value) is None:
                lacking[name].append(_device(device))
    for name, those in sorted(lacking.items()):
        group = (UTILIZATION, ENGINE) if name == "activity" else (USED, FREE)
        yield Problem(
            severity=Severity.ERROR,
            what=f"the {name} of {len(those)} GPUs is missing, though other values arrive",
            evidence=(f"no {name}: {some(those)}",),
            remedy=f"have dcgm-exporter export {', '.join(_FIELDS[one][0] for one in group)}: "
            f"{_COUNTERS}",
        )


def _device(device: Object) -> str:
    index, instance = device.get("index"), text_of(device.get("gpu_instance_id"))
    shown = "?" if index is None else str(index)
    return f"{device.get('node')}::{shown}{'/' if instance else ''}{instance}"


def _not_counted(facts: Facts) -> Iterator[Problem]:
    """Find counters files without XID errors."""
    evidence = [
        f"ConfigMap {key_of(item)} {name}: {len(counters)} counters, not {' or '.join(_XIDS[:3])}"
        for item in facts.config_maps or ()
        for name, value in sorted(mapping_of(item.get("data")).items())
        if (counters := set(_COUNTER.findall(text_of(value)))) and not counters.intersection(_XIDS)
    ]
    if evidence:
        yield Problem(
            severity=Severity.WARNING,
            what="dcgm-exporter does not export XID errors: a broken GPU appears idle until "
            "another signal shows the fault",
            evidence=tuple(evidence),
            remedy=f'add the line "{_XIDS[0]}, gauge, XID errors" there, and restart dcgm-exporter',
        )
