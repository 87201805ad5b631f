"""How the devices of a node are listed: the same in every answer and on the page."""

from typing import Protocol


class Listed(Protocol):
    """A device by which its place is known."""

    @property
    def index(self) -> int | None:
        """Its number on the node; None where unknown."""

    @property
    def uuid(self) -> str:
        """Its card's UUID, "" where unknown."""

    @property
    def gpu_instance_id(self) -> str:
        """Of a MIG instance, "" for a whole card."""


def order_of(device: Listed) -> tuple[int, str, int]:
    """Return where a device stands among those of its node: by card, then by instance."""
    text = device.gpu_instance_id
    return (
        device.index if device.index is not None and device.uuid else 1 << 30,
        device.uuid,
        int(text) if text.isascii() and text.isdecimal() else -1,
    )
