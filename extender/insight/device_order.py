"""Sort order of a node's devices in all answers and on the page."""

from typing import Protocol


class OrderedDevice(Protocol):
    """A device with the fields that determine its position."""

    @property
    def index(self) -> int | None:
        """Index on the node; None if unknown."""

    @property
    def uuid(self) -> str:
        """UUID of the card, "" if unknown."""

    @property
    def gpu_instance_id(self) -> str:
        """GPU instance id of a MIG instance, "" for a whole card."""


def order_of(device: OrderedDevice) -> tuple[int, str, int]:
    """Return a device's sort key: by card index, UUID, then MIG instance."""
    text = device.gpu_instance_id
    return (
        device.index if device.index is not None and device.uuid else 1 << 30,
        device.uuid,
        int(text) if text.isascii() and text.isdecimal() else -1,
    )
