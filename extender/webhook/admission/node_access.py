"""Whether a pod can go to the nodes of the scheduler that it would be given; else it would wait."""

from collections.abc import Mapping
from typing import Final

from extender.core.nodes.inventory import NodeRecord
from extender.core.nodes.node_affinity import selects
from extender.core.nodes.node_selection import Operator, Selection, Term
from extender.core.untyped import mapping_of, objects_of

LABEL: Final = "idlegpu.io/scheduler"
"""Label of the nodes that a scheduler places pods on, with its name as value: `addedAffinity` of
its configuration wants it."""


def is_pinned(pod: Mapping[str, object], selection: Selection) -> bool:
    """Tell whether a pod is meant for nodes by name, as a DaemonSet's are: theirs may be no others.

    Args:
        pod: the Pod object.
        selection: what it says of its nodes.
    """
    owners = objects_of(mapping_of(pod.get("metadata")).get("ownerReferences"))
    return any(owner.get("kind") == "DaemonSet" for owner in owners) or any(
        field.operator is Operator.IN for term in selection.terms or () for field in term.fields
    )


def takes_nodes_of(scheduler: str, selection: Selection) -> bool:
    """Tell whether a pod can go to nodes with the label of a scheduler, for all it says of that.

    Example:
        >>> takes_nodes_of("idlegpu-scheduler", Selection(labels=((LABEL, "another"),)))
        False
        >>> takes_nodes_of("idlegpu-scheduler", Selection(labels=(("disk", "ssd"),)))
        True
    """
    about_label = Selection(
        labels=tuple(label for label in selection.labels if label[0] == LABEL),
        terms=None
        if selection.terms is None
        else tuple(
            Term(labels=tuple(one for one in term.labels if one.key == LABEL))
            for term in selection.terms
        ),
    )
    return selects(about_label, NodeRecord(name="", labels={LABEL: scheduler}))
