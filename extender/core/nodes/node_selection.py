"""Parse a pod's node selector, required node affinity and tolerations.

Parsing never raises: an invalid field counts as absent, as the API server rejects such pods.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from extender.core.untyped import items_of, mapping_of, objects_of, text_of

_Toleration = tuple[str, str, str | None]
"""Key, effect and value; "" for any key or effect, None for any value."""

_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"
REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"

_MOST_PARTS: Final = 1000
"""Limit for labels, terms, requirements, values and tolerations of a pod together: parsing more
would delay other requests."""

_PART_SIZE: Final = 16
"""Overhead per text in `Selection.size`, in bytes."""


class Operator(StrEnum):
    """Comparison operator of a requirement in `matchExpressions`."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A condition on a label or field of a node.

    Attributes:
        key: the label, or the field.
        operator: the comparison.
        values: values to compare with.
    """

    key: str
    operator: Operator
    values: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Requirements that must all be met.

    Attributes:
        fields: requirements on fields; Kubernetes supports only `metadata.name`.
    """

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A pod's conditions on its node.

    Attributes:
        labels: `nodeSelector`, sorted.
        terms: terms of the required node affinity, one must be met; None without affinity.
    """

    labels: tuple[tuple[str, str], ...] = ()
    terms: tuple[Term, ...] | None = None
    tolerations: frozenset[_Toleration] = field(default=frozenset())

    @property
    def size(self) -> int:
        """Approximate size of labels, requirements and tolerations in bytes."""
        texts = [*(text for label in self.labels for text in label)]
        for requirement in self.requirements:
            texts += (requirement.key, *requirement.values)
        texts += (text or "" for toleration in self.tolerations for text in toleration)
        return sum(len(text) + _PART_SIZE for text in texts)

    @property
    def requirements(self) -> Iterator[Requirement]:
        """All requirements of the affinity."""
        for term in self.terms or ():
            yield from (*term.labels, *term.fields)


ANYWHERE: Final = Selection(tolerations=frozenset({("", "", None)}))
"""Selection that matches any node, with any taints."""


def is_excessive(pod: Mapping[str, object]) -> bool:
    """Return whether a pod's node selection exceeds the size limit, without parsing it.

    Example:
        >>> is_excessive({"spec": {"tolerations": [{}] * 1001}})
        True
    """
    spec = mapping_of(pod.get("spec"))
    terms = items_of(mapping_of(_node_affinity(spec).get(REQUIRED)).get("nodeSelectorTerms"))
    parts = len(mapping_of(spec.get("nodeSelector"))) + len(items_of(spec.get("tolerations")))
    parts += len(terms)
    for term in terms if parts <= _MOST_PARTS else ():
        for kind in ("matchExpressions", "matchFields"):
            requirements = items_of(mapping_of(term).get(kind))
            parts += len(requirements)
            if parts > _MOST_PARTS:
                return True
            parts += sum(len(items_of(mapping_of(one).get("values"))) for one in requirements)
    return parts > _MOST_PARTS


def read_selection(pod: Mapping[str, object]) -> Selection:
    """Parse a pod's node selection from a Pod object of any shape.

    Example:
        >>> read_selection({"spec": {"nodeSelector": {"disk": "ssd"}}}).labels
        (('disk', 'ssd'),)
    """
    spec = mapping_of(pod.get("spec"))
    selector = mapping_of(spec.get("nodeSelector"))
    required = _node_affinity(spec).get(REQUIRED)
    return Selection(
        labels=tuple(sorted((key, text_of(value)) for key, value in selector.items())),
        terms=tuple(_terms(mapping_of(required))) if isinstance(required, dict) else None,
        tolerations=frozenset(_tolerations(objects_of(spec.get("tolerations")))),
    )


def has_preferences(pod: Mapping[str, object]) -> bool:
    """Return whether a pod has preferred affinity or soft topology spread.

    Example:
        >>> has_preferences({"spec": {"topologySpreadConstraints": [
        ...     {"whenUnsatisfiable": "ScheduleAnyway", "topologyKey": "zone"}]}})
        True
    """
    spec = mapping_of(pod.get("spec"))
    kinds = mapping_of(spec.get("affinity")).values()
    return any(mapping_of(kind).get(_PREFERRED) for kind in kinds) or any(
        constraint.get("whenUnsatisfiable") == "ScheduleAnyway"
        for constraint in objects_of(spec.get("topologySpreadConstraints"))
    )


def _node_affinity(spec: Mapping[str, object]) -> Mapping[str, object]:
    return mapping_of(mapping_of(spec.get("affinity")).get("nodeAffinity"))


def _terms(required: Mapping[str, object]) -> Iterator[Term]:
    """Yield the terms that a node can meet; an empty or invalid term selects no node."""
    for term in objects_of(required.get("nodeSelectorTerms")):
        labels = _requirements(term.get("matchExpressions"))
        fields = _requirements(term.get("matchFields"))
        if labels is not None and fields is not None and (labels or fields):
            yield Term(labels=labels, fields=fields)


def _requirements(expressions: object) -> tuple[Requirement, ...] | None:
    """Parse requirements; None if an operator is unknown to Kubernetes."""
    found = []
    for each in objects_of(expressions):
        operator = text_of(each.get("operator"))
        if operator not in set(Operator):
            return None
        values = frozenset(map(text_of, items_of(each.get("values"))))
        key = text_of(each.get("key"))
        found.append(Requirement(key=key, operator=Operator(operator), values=values))
    return tuple(found)


def _tolerations(tolerations: Iterable[Mapping[str, object]]) -> Iterator[_Toleration]:
    for toleration in tolerations:
        key, effect = text_of(toleration.get("key")), text_of(toleration.get("effect"))
        operator = text_of(toleration.get("operator"))
        if operator == "Exists":
            yield key, effect, None
        elif key:
            # Gt and Lt (alpha, off by default) count as met: one node too many is better.
            is_compared = operator in {Operator.GT, Operator.LT}
            yield key, effect, None if is_compared else text_of(toleration.get("value"))
