"""Build kubectl commands for remedies, with the names of the affected objects."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from extender.cli.doctor.facts import Facts, Object
from extender.cli.doctor.objects import is_called, is_over, name_of, node_of
from extender.core.untyped import mapping_of, objects_of, text_of

MOST: Final = 10
"""Largest number of objects to name in a command."""


def named(names: Iterable[str]) -> str:
    """Join distinct names into command arguments, with a note if some are left out.

    Example:
        >>> named(["b", "a", "b"]), named(str(number) for number in range(12))
        ('b a', '0 1 2 3 4 5 6 7 8 9 (and 2 more)')
    """
    every = list(dict.fromkeys(names))
    more = len(every) - MOST
    return " ".join(every[:MOST]) + (f" (and {more} more)" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class WorkloadPart:
    """A cluster component, identified by the names of its pods and DaemonSets.

    Attributes:
        words: substrings; a name contains at least one of them.
        others: substrings of other components' names, which exclude a match.
    """

    words: tuple[str, ...]
    others: tuple[str, ...] = ()

    def pods_on(self, facts: Facts, nodes: Iterable[str]) -> list[Object]:
        """Return the component's unfinished pods on the given nodes."""
        wanted = set(nodes)
        return [
            pod
            for pod in facts.pods or ()
            if node_of(pod) in wanted and self._is(pod) and not is_over(pod)
        ]

    def restart(self, facts: Facts, otherwise: str) -> str:
        """Return the commands that restart the component's DaemonSets, else `otherwise`."""
        found = {(_namespace(item), name_of(item)) for item in facts.daemon_sets or ()
                 if self._is(item)}  # fmt: skip
        for pod in filter(self._is, facts.pods or ()):
            found |= {(_namespace(pod), text_of(owner.get("name"))) for owner in _owners(pod)}
        commands = "; ".join(
            f"kubectl -n {namespace} rollout restart daemonset {name}"
            for namespace, name in sorted(found)
        )
        return commands or otherwise

    def _is(self, item: Object) -> bool:
        return is_called(item, self.words) and not is_called(item, self.others)


def logs(pods: Sequence[Object], otherwise: str) -> str:
    """Return the commands that print the pods' logs, or `otherwise` without pods."""
    every = [f"kubectl -n {_namespace(pod)} logs {name_of(pod)}" for pod in pods]
    more = len(every) - MOST
    commands = "; ".join(every[:MOST]) + (f" (and {more} more)" if more > 0 else "")
    return commands or otherwise


def delete(pods: Sequence[Object], otherwise: str) -> str:
    """Return commands that delete pods, so that they are recreated; `otherwise` without pods."""
    by_namespace: dict[str, list[str]] = {}
    for pod in pods:
        by_namespace.setdefault(_namespace(pod), []).append(name_of(pod))
    commands = "; ".join(
        f"kubectl -n {namespace} delete pod {named(names)}"
        for namespace, names in sorted(by_namespace.items())
    )
    return commands or otherwise


def _owners(pod: Object) -> list[Mapping[str, object]]:
    owners = objects_of(mapping_of(pod.get("metadata")).get("ownerReferences"))
    return [owner for owner in owners if owner.get("kind") == "DaemonSet"]


def _namespace(item: Object) -> str:
    return text_of(mapping_of(item.get("metadata")).get("namespace")) or "default"
