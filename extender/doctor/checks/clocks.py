"""Whether clocks agree: the nodes' with the API server's, the extender's with this machine's."""

from collections.abc import Iterator
from typing import Final

from extender.core.untyped import mapping_of, objects_of
from extender.doctor.facts import Facts, Object
from extender.doctor.findings import Problem, Severity
from extender.doctor.objects import condition_of, name_of, parse_time, some

SKEW_SECONDS: Final = 10.0
"""Clocks that are kept by NTP differ by far less; the API server writes whole seconds."""


def skewed(facts: Facts) -> Iterator[Problem]:
    """Find clocks that differ."""
    evidence = []
    for node in facts.nodes or ():
        skew = _skew(node, facts.at)
        if skew is not None and abs(skew) > SKEW_SECONDS:
            evidence.append(
                f"{name_of(node)}: {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}"
            )
    if evidence:
        yield Problem(
            severity=Severity.ERROR,
            what="clocks of nodes differ from the API server's: ages of readings are wrong there",
            evidence=tuple(evidence),
            remedy="on the node: timedatectl set-ntp true && chronyc makestep",
        )
    skew = 0.0 if facts.extender_at is None else facts.extender_at - facts.at
    if abs(skew) > SKEW_SECONDS:
        yield Problem(
            severity=Severity.WARNING,
            what="the extender's clock differs from this machine's: one of them is wrong",
            evidence=(
                f"the extender is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} here",
            ),
            remedy="on the one that is wrong: timedatectl set-ntp true && chronyc makestep",
        )


def untold(facts: Facts) -> str:
    """Return why it is not known of some nodes whether their clocks are right, "" if it is of all.

    kubectl leaves out, unless it is told otherwise, what the API server noted.
    """
    beating = [node for node in facts.nodes or () if _beat(node) is not None]
    silent = [name_of(node) for node in beating if _noted(node) is None]
    if not silent:
        return ""
    return (
        f"nodes: {len(silent)} of {len(beating)} come without the time at which the API server "
        f"noted their heartbeat ({some(silent)}): kubectl get nodes -o json --show-managed-fields"
    )


def _skew(node: Object, at: float) -> float | None:
    """Return by how much a node's clock is ahead, None where nothing tells.

    A kubelet writes heartbeats by its clock, and the API server notes by its own when it did. Where
    that is not there, a heartbeat that is yet to come still tells.
    """
    beat, written = _beat(node), _noted(node)
    if beat is None:
        return None
    if written is not None:
        return beat - written
    return beat - at if beat > at else None


def _beat(node: Object) -> float | None:
    """Return a kubelet's last heartbeat by its own clock."""
    return parse_time(condition_of(node, "Ready").get("lastHeartbeatTime"))


def _noted(node: Object) -> float | None:
    """Return when the API server noted it, by its clock."""
    noted = [
        parse_time(entry.get("time"))
        for entry in objects_of(mapping_of(node.get("metadata")).get("managedFields"))
        if entry.get("subresource") == "status" and entry.get("manager") == "kubelet"
    ]
    return max((time for time in noted if time is not None), default=None)
