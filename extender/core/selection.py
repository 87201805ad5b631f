"""Which nodes a pod may go to by its own word: selector, required affinity, tolerations.

Nothing here raises for any pod; what the API server would let no pod say counts as absent.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from extender.core.untyped import items_of, mapping_of, objects_of, text_of

Toleration = tuple[str, str, str | None]
"""Key, effect and value; "" for any key or effect, None for any value."""

PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"
REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"

MOST_PARTS: Final = 1000
"""Labels, terms, requirements, values and tolerations of a pod, together: reading more takes longer
than others may have to wait."""

PART_SIZE: Final = 16
"""What a text takes beside its characters, as `Selection.size` counts."""


class Operator(StrEnum):
    """How a requirement compares, as `matchExpressions` has it."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """What a label or field of a node must be.

    Attributes:
        key: the label, or the field.
        operator: how it is compared.
        values: with what.
    """

    key: str
    operator: Operator
    values: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Requirements that must all be met.

    Attributes:
        labels: of labels.
        fields: of fields; there is `metadata.name` alone.
    """

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a pod says of the nodes that it may go to.

    Attributes:
        labels: `nodeSelector`, sorted.
        terms: required node affinity, of which one must be met; None where there is none.
        tolerations: its tolerations.
    """

    labels: tuple[tuple[str, str], ...] = ()
    terms: tuple[Term, ...] | None = None
    tolerations: frozenset[Toleration] = field(default=frozenset())

    @property
    def size(self) -> int:
        """How much it says, in bytes, roughly; of requirements and tolerations."""
        texts = [*(text for label in self.labels for text in label)]
        for requirement in self.requirements:
            texts += (requirement.key, *requirement.values)
        texts += (text or "" for toleration in self.tolerations for text in toleration)
        return sum(len(text) + PART_SIZE for text in texts)

    @property
    def requirements(self) -> Iterator[Requirement]:
        """All requirements of the affinity."""
        for term in self.terms or ():
            yield from (*term.labels, *term.fields)


ANYWHERE: Final = Selection(tolerations=frozenset({("", "", None)}))
"""Any node will do, whatever its taints."""


def is_excessive(pod: Mapping[str, object]) -> bool:
    """Tell whether a pod says too much of its nodes to be read, for less than reading it costs.

    Example:
        >>> is_excessive({"spec": {"tolerations": [{}] * 1001}})
        True
    """
    spec = mapping_of(pod.get("spec"))
    terms = items_of(mapping_of(_node_affinity(spec).get(REQUIRED)).get("nodeSelectorTerms"))
    parts = len(mapping_of(spec.get("nodeSelector"))) + len(items_of(spec.get("tolerations")))
    parts += len(terms)
    for term in terms if parts <= MOST_PARTS else ():
        for kind in ("matchExpressions", "matchFields"):
            requirements = items_of(mapping_of(term).get(kind))
            parts += len(requirements)
            if parts > MOST_PARTS:
                return True
            parts += sum(len(items_of(mapping_of(one).get("values"))) for one in requirements)
    return parts > MOST_PARTS


def read_selection(pod: Mapping[str, object]) -> Selection:
    """Read what a pod says of its nodes; anything at all is taken.

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
    """Tell whether a pod wishes for nodes that it does not require: affinity, or soft spread.

    Example:
        >>> has_preferences({"spec": {"topologySpreadConstraints": [
        ...     {"whenUnsatisfiable": "ScheduleAnyway", "topologyKey": "zone"}]}})
        True
    """
    spec = mapping_of(pod.get("spec"))
    kinds = mapping_of(spec.get("affinity")).values()
    return any(mapping_of(kind).get(PREFERRED) for kind in kinds) or any(
        constraint.get("whenUnsatisfiable") == "ScheduleAnyway"
        for constraint in objects_of(spec.get("topologySpreadConstraints"))
    )


def _node_affinity(spec: Mapping[str, object]) -> Mapping[str, object]:
    return mapping_of(mapping_of(spec.get("affinity")).get("nodeAffinity"))


def _terms(required: Mapping[str, object]) -> Iterator[Term]:
    """Yield the terms that some node may meet: an empty one selects none, nor does a bad one."""
    for term in objects_of(required.get("nodeSelectorTerms")):
        labels = _requirements(term.get("matchExpressions"))
        fields = _requirements(term.get("matchFields"))
        if labels is not None and fields is not None and (labels or fields):
            yield Term(labels=labels, fields=fields)


def _requirements(told: object) -> tuple[Requirement, ...] | None:
    """Return requirements, None where one of them is none that Kubernetes knows."""
    found = []
    for each in objects_of(told):
        operator = text_of(each.get("operator"))
        if operator not in set(Operator):
            return None
        values = frozenset(map(text_of, items_of(each.get("values"))))
        key = text_of(each.get("key"))
        found.append(Requirement(key=key, operator=Operator(operator), values=values))
    return tuple(found)


def _tolerations(tolerations: Iterable[Mapping[str, object]]) -> Iterator[Toleration]:
    """Yield each toleration that means anything."""
    for toleration in tolerations:
        key, effect = text_of(toleration.get("key")), text_of(toleration.get("effect"))
        operator = text_of(toleration.get("operator"))
        if operator == "Exists":
            yield key, effect, None
        elif key:
            # Gt and Lt (alpha, off by default) are taken for met: better a node too many.
            is_compared = operator in {Operator.GT, Operator.LT}
            yield key, effect, None if is_compared else text_of(toleration.get("value"))
