"""Check that clocks agree: nodes with the API server, the extender with this machine."""

from collections.abc import Iterator
from typing import Final

from extender.cli.doctor.facts import Facts, Object
from extender.cli.doctor.findings import Problem, Severity, check
from extender.cli.doctor.objects import condition_of, name_of, parse_time, some
from extender.core.untyped import mapping_of, objects_of

_SKEW_SECONDS: Final = 10.0
"""Largest accepted difference. NTP keeps clocks far closer; API timestamps are whole seconds."""


def _unknown(facts: Facts) -> str:
    """Return the nodes whose clocks cannot be checked, "" if there are none.

    kubectl omits the required managedFields unless `--show-managed-fields` is given.
    """
    beating = [node for node in facts.nodes or () if _beat(node) is not None]
    silent = [name_of(node) for node in beating if _noted(node) is None]
    if not silent:
        return ""
    return (
        f"nodes: {len(silent)} of {len(beating)} lack the time at which the API server recorded "
        f"their heartbeat ({some(silent)}): kubectl get nodes -o json --show-managed-fields"
    )


@check("IG104", "clocks agree", needs=("nodes",), unseen=_unknown)
def _skewed(facts: Facts) -> Iterator[Problem]:
    """Find clocks that differ by more than 10 s.

    The time in a kubelet's heartbeat is compared with the time at which the API server recorded it,
    and the extender's clock with this machine's. Without `managedFields`, which kubectl omits by
    default, the check cannot run.

    Remedy: NTP.
    """
    evidence = []
    for node in facts.nodes or ():
        skew = _skew(node, facts.at)
        if skew is not None and abs(skew) > _SKEW_SECONDS:
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
    if abs(skew) > _SKEW_SECONDS:
        yield Problem(
            severity=Severity.WARNING,
            what="the extender's clock differs from this machine's: one of them is wrong",
            evidence=(
                f"the extender is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} here",
            ),
            remedy="on the one that is wrong: timedatectl set-ntp true && chronyc makestep",
        )


def _skew(node: Object, at: float) -> float | None:
    """Return the seconds by which a node's clock is ahead of the API server's, None if unknown.

    The kubelet writes its heartbeat with its own clock, and the API server records the time of that
    write. Without that record, only a heartbeat in the future shows a difference.
    """
    beat, written = _beat(node), _noted(node)
    if beat is None:
        return None
    if written is not None:
        return beat - written
    return beat - at if beat > at else None


def _beat(node: Object) -> float | None:
    """Return the time of a kubelet's last heartbeat, by the kubelet's clock."""
    return parse_time(condition_of(node, "Ready").get("lastHeartbeatTime"))


def _noted(node: Object) -> float | None:
    """Return the time at which the API server recorded the heartbeat, by the API server's clock."""
    noted = [
        parse_time(entry.get("time"))
        for entry in objects_of(mapping_of(node.get("metadata")).get("managedFields"))
        if entry.get("subresource") == "status" and entry.get("manager") == "kubelet"
    ]
    return max((time for time in noted if time is not None), default=None)
