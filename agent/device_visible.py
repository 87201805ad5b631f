"""Works out which devices CUDA shows a process, as CUDA reads its environment. Pure.

CUDA's rules, which this follows: entries of `CUDA_VISIBLE_DEVICES` count until the first that is
not valid; an entry given twice leaves nothing; indices count in CUDA's own order; identifiers may
be shortened while they mean one device. A process is shown one MIG instance at most.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_INDEX: Final = re.compile(r"\s*\+?(\d+)")  # CUDA reads as far as there are digits: "1abc" is 1
_OLD_MIG: Final = re.compile(r"MIG-(GPU-[0-9a-f-]+)/(\d+)/(\d+)", re.IGNORECASE)
_EVERYTHING: Final = frozenset({"", "all", "void"})
_SHARE: Final = "::"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a device is.

    Attributes:
        utilization_ratio: 0 to 1, None where unknown.
        memory_used_ratio: of its memory, 0 to 1, None where unknown.
    """

    utilization_ratio: float | None = None
    memory_used_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A MIG device of a card.

    Attributes:
        uuid: its identity, `MIG-…`.
        gpu_instance_id, compute_instance_id: how older drivers named it; None where unknown.
        load: None where unknown.
    """

    uuid: str
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    load: Load | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU that the container has.

    Attributes:
        uuid: its identity, "" where it cannot be found out.
        minor: number of its `/dev/nvidia<n>`, the same inside and outside of containers.
        model: "" where unknown.
        load: None where unknown.
        instances: its MIG devices; None where it is not partitioned.
    """

    uuid: str
    minor: int | None = None
    model: str = ""
    load: Load | None = None
    instances: tuple[Instance, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a worker can be given: a card or a MIG instance.

    Attributes:
        id: its UUID, or `#<n>` by CUDA's index where that is unknown.
        index: what a program calls it: n of `cuda:<n>`.
        selector: what `CUDA_VISIBLE_DEVICES` must be for a process to see it alone, as `cuda:0`.
        minor: of its card.
        load: None where unknown.
        needs_selector: CUDA does not show it unless `CUDA_VISIBLE_DEVICES` is that.
    """

    id: str
    index: int
    selector: str
    minor: int | None = None
    load: Load | None = None
    needs_selector: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """The devices that a worker may choose from.

    Attributes:
        devices: in CUDA's order.
        why_none: why there are none, "" where there are.
    """

    devices: tuple[Device, ...]
    why_none: str = ""


def visible_devices(cards: Sequence[Card], environment: Mapping[str, str]) -> Visible:
    """Return the devices that CUDA shows a process of this container with this environment.

    Args:
        cards: all that the container has, in CUDA's order.
        environment: `CUDA_VISIBLE_DEVICES` and `NVIDIA_VISIBLE_DEVICES` are read.

    Example:
        >>> cards = [Card(uuid="GPU-a"), Card(uuid="GPU-b")]
        >>> seen = visible_devices(cards, {"CUDA_VISIBLE_DEVICES": "1,0"})
        >>> [(device.id, device.index) for device in seen.devices]
        [('GPU-b', 0), ('GPU-a', 1)]
    """
    if not cards:
        return Visible(devices=(), why_none="no GPU is found")
    if environment.get("NVIDIA_VISIBLE_DEVICES", "").strip().lower() == "none":
        return Visible(devices=(), why_none="NVIDIA_VISIBLE_DEVICES is none")
    every = tuple(slot for number, card in enumerate(cards) for slot in _slots(number, card))
    if not every:
        return Visible(devices=(), why_none="the GPU is partitioned and has no MIG instance")
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    shown = every if listed is None else _listed(listed, cards)
    if not shown:
        return Visible(devices=(), why_none=f"CUDA_VISIBLE_DEVICES is {listed!r}")
    return Visible(devices=_allotted(_devices(cards, shown), environment))


_Slot = tuple[int, int]
"""Number of the card, and of the instance on it: `_WHOLE` for a card without."""
_WHOLE: Final = -1


def _slots(number: int, card: Card) -> tuple[_Slot, ...]:
    if card.instances is None:
        return ((number, _WHOLE),)
    return tuple((number, place) for place in range(len(card.instances)))


def _listed(listed: str, cards: Sequence[Card]) -> tuple[_Slot, ...]:
    """Read `CUDA_VISIBLE_DEVICES`; the first entry says whether indices or which UUIDs follow."""
    entries = [entry.strip() for entry in listed.split(",")]
    kind = _kind(entries[0])
    shown: list[_Slot] = []
    for entry in entries:
        slots = _find(entry, cards) if _kind(entry) == kind else ()
        if not slots:
            break
        if not set(slots).isdisjoint(shown):
            return ()
        shown.extend(slots)
    return tuple(shown)


def _kind(entry: str) -> str:
    return entry[:4] if entry.startswith(("GPU-", "MIG-")) else ""


def _find(entry: str, cards: Sequence[Card]) -> tuple[_Slot, ...]:
    """Return what one entry means; an index or UUID of a partitioned card means its instances."""
    if entry.startswith("GPU-"):
        found = [number for number, card in enumerate(cards) if _begins(card.uuid, entry)]
        return _slots(found[0], cards[found[0]]) if len(found) == 1 else ()
    if entry.startswith("MIG-"):
        instances = _instances(entry, cards)
        return instances if len(instances) == 1 else ()
    index = _INDEX.match(entry)
    if index is None or int(index[1]) >= len(cards):
        return ()
    return _slots(int(index[1]), cards[int(index[1])])


def _instances(entry: str, cards: Sequence[Card]) -> tuple[_Slot, ...]:
    old = _OLD_MIG.fullmatch(entry)
    return tuple(
        (number, place)
        for number, card in enumerate(cards)
        for place, instance in enumerate(card.instances or ())
        if _begins(instance.uuid, entry)
        or (
            old is not None
            and _begins(card.uuid, old[1])
            and (instance.gpu_instance_id, instance.compute_instance_id)
            == (int(old[2]), int(old[3]))
        )
    )


def _begins(uuid: str, entry: str) -> bool:
    return bool(uuid) and uuid.lower().startswith(entry.lower())


def _devices(cards: Sequence[Card], shown: Sequence[_Slot]) -> tuple[Device, ...]:
    is_one_at_a_time = len(shown) > 1 and any(place != _WHOLE for _, place in shown)
    return tuple(
        _device(
            cards[number],
            place,
            number,
            index=0 if is_one_at_a_time else index,
            alone=is_one_at_a_time,
        )
        for index, (number, place) in enumerate(shown)
    )


def _device(card: Card, place: int, number: int, *, index: int, alone: bool) -> Device:
    part: Card | Instance = card if card.instances is None else card.instances[place]
    return Device(
        id=part.uuid or f"#{number}",
        index=index,
        selector=part.uuid or str(number),
        minor=card.minor,
        load=part.load,
        needs_selector=alone,
    )


def _allotted(devices: tuple[Device, ...], environment: Mapping[str, str]) -> tuple[Device, ...]:
    """Leave what the container was given: a privileged one sees all devices of the machine.

    `NVIDIA_VISIBLE_DEVICES` names UUIDs (of shares with `::n`) where a device plugin writes it.
    Indices are the machine's and say nothing inside; what fits no device is not of this place.
    """
    listed = environment.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    if listed.lower() in _EVERYTHING:
        return devices
    names = {entry.strip().partition(_SHARE)[0].lower() for entry in listed.split(",")}
    given = tuple(device for device in devices if device.id.lower() in names)
    return given or devices
