"""Parse the nodes and GPUs that a pod names in its annotation `idlegpu.io/target`."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from typing_extensions import override  # in typing from Python 3.12 on

_MAX_TARGETS: Final = 32
_MAX_DEVICES: Final = 64
_MAX_INDEX: Final = 255

TARGETS_ALLOWED: Final = (
    f"1 to {_MAX_TARGETS} nodes separated by semicolons, each with GPU indices after :: if wanted, "
    "such as gpu-1::0,2; gpu-2"
)
TARGET_POLICY_ALLOWED: Final = "require or prefer"

_NODE: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_INDEX: Final = re.compile(r"[0-9]{1,3}")


class TargetPolicy(StrEnum):
    """Behavior of a pod while none of its targets can take it."""

    REQUIRE = "require"
    """It waits."""
    PREFER = "prefer"
    """It goes to any other node."""


@dataclass(frozen=True, slots=True)
class Target:
    """A node that a pod names.

    Attributes:
        node: name of the node.
        devices: indices of its GPUs that the pod prefers, ascending; () for any. The kubelet
            chooses among the free GPUs, so an index is a preference.
        is_usable: False if the node has no GPU with one of these indices.
    """

    node: str
    devices: tuple[int, ...] = ()
    is_usable: bool = True

    @override
    def __str__(self) -> str:
        """Return the target as an annotation spells it."""
        return f"{self.node}::{','.join(map(str, self.devices))}" if self.devices else self.node


def parse_targets(text: str) -> tuple[Target, ...]:
    """Parse a list of targets, in the order in which they are tried.

    Raises:
        ValueError: `text` is not such a list.

    Example:
        >>> [str(target) for target in parse_targets("gpu-1::2,0; GPU-2")]
        ['gpu-1::0,2', 'gpu-2']
    """
    targets = tuple(dict.fromkeys(_parse(each.strip()) for each in text.split(";") if each.strip()))
    if not 1 <= len(targets) <= _MAX_TARGETS:
        raise ValueError(f"must be {TARGETS_ALLOWED}")
    return targets


def _parse(text: str) -> Target:
    node, separator, listed = text.lower().partition("::")
    indices = [each.strip() for each in listed.split(",")] if separator else []
    are_numbers = all(_INDEX.fullmatch(each) for each in indices)
    if not _NODE.fullmatch(node.strip()) or not are_numbers or len(indices) > _MAX_DEVICES:
        raise ValueError(f"{text!r}: must be {TARGETS_ALLOWED}")
    devices = tuple(sorted(set(map(int, indices))))
    if devices and devices[-1] > _MAX_INDEX:
        raise ValueError(f"{text!r}: must be {TARGETS_ALLOWED}")
    return Target(node.strip(), devices)
