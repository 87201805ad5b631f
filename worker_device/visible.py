"""Determine the devices that CUDA shows a process, from its environment.

Follows CUDA's rules for `CUDA_VISIBLE_DEVICES`: entries after the first invalid one are ignored; a
duplicate entry hides all devices; indices are in CUDA's order; a unique prefix of a UUID is enough.
CUDA shows a process at most one MIG instance.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_INDEX: Final = re.compile(r"\s*\+?(\d+)")  # CUDA reads leading digits: "1abc" is 1
_LEGACY_MIG: Final = re.compile(r"MIG-(GPU-[0-9a-f-]+)/(\d+)/(\d+)", re.IGNORECASE)
_EVERYTHING: Final = frozenset({"", "all", "void"})
_SHARE: Final = "::"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of a device.

    Attributes:
        utilization_ratio: 0 to 1; None if unknown.
        memory_used_ratio: memory used / total memory; None if unknown.
    """

    utilization_ratio: float | None = None
    memory_used_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A MIG device of a card.

    Attributes:
        uuid: MIG UUID, `MIG-…`.
        gpu_instance_id, compute_instance_id: NVML's ids, part of the names that older drivers give
            MIG devices; None if unknown.
        load: None if unknown.
    """

    uuid: str
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    load: Load | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU of the container.

    Attributes:
        uuid: UUID of the card; "" if unknown.
        minor: n of `/dev/nvidia<n>`, the same inside and outside of containers; None if unknown.
        model: "" if unknown.
        load: None if unknown.
        instances: MIG devices of the card; None if MIG is off.
    """

    uuid: str
    minor: int | None = None
    model: str = ""
    load: Load | None = None
    instances: tuple[Instance, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A card or MIG instance that a worker can use.

    Attributes:
        id: UUID; `#<n>`, with the card's CUDA index, if the UUID is unknown.
        index: n of `cuda:<n>`.
        selector: value of `CUDA_VISIBLE_DEVICES` that makes only this device visible, as `cuda:0`.
        minor: n of the card's `/dev/nvidia<n>`; None if unknown.
        load: None if unknown.
        needs_selector: whether CUDA shows the device only if `CUDA_VISIBLE_DEVICES` is `selector`.
    """

    id: str
    index: int
    selector: str
    minor: int | None = None
    load: Load | None = None
    needs_selector: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """Devices that a worker can choose from.

    Attributes:
        devices: devices in CUDA's order.
        reason: why there are no devices; "" if there are devices.
    """

    devices: tuple[Device, ...]
    reason: str = ""


def visible_devices(cards: Sequence[Card], environment: Mapping[str, str]) -> Visible:
    """Return the devices that CUDA shows a process of this container.

    Args:
        cards: all GPUs of the container in CUDA's order.
        environment: the process environment; `CUDA_VISIBLE_DEVICES` and `NVIDIA_VISIBLE_DEVICES`
            are read.

    Example:
        >>> cards = [Card(uuid="GPU-a"), Card(uuid="GPU-b")]
        >>> visible = visible_devices(cards, {"CUDA_VISIBLE_DEVICES": "1,0"})
        >>> [(device.id, device.index) for device in visible.devices]
        [('GPU-b', 0), ('GPU-a', 1)]
    """
    if not cards:
        return Visible(devices=(), reason="no GPU found")
    if environment.get("NVIDIA_VISIBLE_DEVICES", "").strip().lower() == "none":
        return Visible(devices=(), reason="NVIDIA_VISIBLE_DEVICES is none")
    all_slots = tuple(slot for number, card in enumerate(cards) for slot in _slots(number, card))
    if not all_slots:
        return Visible(devices=(), reason="MIG is on, and there is no MIG instance")
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    shown = all_slots if listed is None else _parse_visible(listed, cards)
    if not shown:
        return Visible(devices=(), reason=f"CUDA_VISIBLE_DEVICES is {listed!r}")
    return Visible(devices=_filter_given(_devices(cards, shown), environment))


_Slot = tuple[int, int]
"""(number of the card, number of the instance on it)."""
_WHOLE: Final = -1
"""Number of the instance if MIG is off."""


def _slots(number: int, card: Card) -> tuple[_Slot, ...]:
    if card.instances is None:
        return ((number, _WHOLE),)
    return tuple((number, place) for place in range(len(card.instances)))


def _parse_visible(listed: str, cards: Sequence[Card]) -> tuple[_Slot, ...]:
    """Parse `CUDA_VISIBLE_DEVICES`. All entries must be of one kind: index, GPU or MIG UUID."""
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
    """Resolve one entry. The index or UUID of a card with MIG stands for all its instances."""
    if entry.startswith("GPU-"):
        found = [number for number, card in enumerate(cards) if _has_prefix(card.uuid, entry)]
        return _slots(found[0], cards[found[0]]) if len(found) == 1 else ()
    if entry.startswith("MIG-"):
        instances = _instances(entry, cards)
        return instances if len(instances) == 1 else ()
    index = _INDEX.match(entry)
    if index is None or int(index[1]) >= len(cards):
        return ()
    return _slots(int(index[1]), cards[int(index[1])])


def _instances(entry: str, cards: Sequence[Card]) -> tuple[_Slot, ...]:
    old = _LEGACY_MIG.fullmatch(entry)
    return tuple(
        (number, place)
        for number, card in enumerate(cards)
        for place, instance in enumerate(card.instances or ())
        if _has_prefix(instance.uuid, entry)
        or (
            old is not None
            and _has_prefix(card.uuid, old[1])
            and (instance.gpu_instance_id, instance.compute_instance_id)
            == (int(old[2]), int(old[3]))
        )
    )


def _has_prefix(uuid: str, entry: str) -> bool:
    return bool(uuid) and uuid.lower().startswith(entry.lower())


def _devices(cards: Sequence[Card], shown: Sequence[_Slot]) -> tuple[Device, ...]:
    needs_selector = len(shown) > 1 and any(place != _WHOLE for _, place in shown)
    return tuple(
        _device(
            cards[number],
            place,
            number,
            index=0 if needs_selector else index,
            needs_selector=needs_selector,
        )
        for index, (number, place) in enumerate(shown)
    )


def _device(card: Card, place: int, number: int, *, index: int, needs_selector: bool) -> Device:
    part: Card | Instance = card if card.instances is None else card.instances[place]
    return Device(
        id=part.uuid or f"#{number}",
        index=index,
        selector=part.uuid or str(number),
        minor=card.minor,
        load=part.load,
        needs_selector=needs_selector,
    )


def _filter_given(
    devices: tuple[Device, ...], environment: Mapping[str, str]
) -> tuple[Device, ...]:
    """Keep the devices that are allocated to the container; a privileged one sees all of the node.

    A device plugin sets `NVIDIA_VISIBLE_DEVICES` to UUIDs, with a suffix `::n` for shares. Indices
    in it count the node's GPUs and mean nothing in a container, so they are ignored. If no entry
    matches, all devices are kept.
    """
    listed = environment.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    if listed.lower() in _EVERYTHING:
        return devices
    names = {entry.strip().partition(_SHARE)[0].lower() for entry in listed.split(",")}
    given = tuple(device for device in devices if device.id.lower() in names)
    return given or devices
