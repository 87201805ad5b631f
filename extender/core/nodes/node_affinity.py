"""Match a pod's node selection against a node, as kube-scheduler does.

Covers the plugins NodeAffinity, TaintToleration and NodeUnschedulable. Requirements on labels that
the extender does not store count as met.
"""

import re
from typing import Final

from extender.core.nodes.inventory import NodeRecord, Taint
from extender.core.nodes.labels import is_kept
from extender.core.nodes.node_selection import Operator, Requirement, Selection, Term

CORDON: Final = Taint(key="node.kubernetes.io/unschedulable")
"""Taint of cordoned nodes; pods that tolerate it may go there."""

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_INT64: Final = 1 << 63


def may_go(selection: Selection, node: NodeRecord) -> bool:
    """Return whether labels, taints and cordon let a pod go to a node.

    Example:
        >>> may_go(Selection(labels=(("disk", "ssd"),)), NodeRecord(name="a"))
        False
    """
    if node.is_unschedulable and not tolerates(selection, CORDON):
        return False
    return all(tolerates(selection, taint) for taint in node.taints if taint.repels) and selects(
        selection, node
    )


def selects(selection: Selection, node: NodeRecord) -> bool:
    """Return whether a pod's node selector and required affinity match a node."""
    for key, value in selection.labels:
        if is_kept(key) and node.label(key) != value:
            return False
    return selection.terms is None or any(_meets(node, term) for term in selection.terms)


def tolerates(selection: Selection, taint: Taint) -> bool:
    """Return whether a pod tolerates a taint."""
    return any(
        (key, effect, value) in selection.tolerations
        for key, value in ((taint.key, taint.value), (taint.key, None), ("", None))
        for effect in ("", taint.effect)
    )


def _meets(node: NodeRecord, term: Term) -> bool:
    return all(
        not is_kept(one.key) or _holds(one, node.label(one.key)) for one in term.labels
    ) and all(_holds_of_name(one, node.name) for one in term.fields)


def _holds(requirement: Requirement, value: str | None) -> bool:
    """Return whether a label value, None if missing, meets a requirement."""
    match requirement.operator:
        case Operator.IN:
            return value in requirement.values
        case Operator.NOT_IN:
            return value not in requirement.values
        case Operator.EXISTS:
            return value is not None
        case Operator.DOES_NOT_EXIST:
            return value is None
        case Operator.GT | Operator.LT:
            return _compares(requirement, value)


def _compares(requirement: Requirement, value: str | None) -> bool:
    """Return whether a label's value meets a Gt or Lt requirement."""
    if len(requirement.values) != 1:
        return False
    bound, found = _integer(next(iter(requirement.values))), _integer(value or "")
    if bound is None or found is None:
        return False
    return found > bound if requirement.operator is Operator.GT else found < bound


def _integer(text: str) -> int | None:
    """Parse an int64 like kube-scheduler; None if invalid."""
    if not _INTEGER.fullmatch(text):
        return None
    number = int(text)
    return number if -_INT64 <= number < _INT64 else None


def _holds_of_name(requirement: Requirement, name: str) -> bool:
    """Return whether a node name meets a `metadata.name` requirement with one value."""
    if requirement.key != "metadata.name" or len(requirement.values) != 1:
        return False
    if requirement.operator not in {Operator.IN, Operator.NOT_IN}:
        return False
    return _holds(requirement, name)
