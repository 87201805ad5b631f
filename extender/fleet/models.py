"""Number the GPU models of the fleet, and find the model that a pod would get on a node."""

from collections.abc import Sequence

from extender.core.devices.expected_devices import ExpectedDevice
from extender.core.devices.gpu_models import join_models, normalize_model
from extender.core.nodes.inventory import MODEL_LABELS, NodeRecord
from extender.core.nodes.snapshot import PoolRow


class ModelNumbers:
    """Numbers of GPU models, as rows and snapshots use them; 0 is unknown."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {"": 0}
        self._numbers: dict[str, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Normalized model names; a row's `model_id` is an index into them."""
        return tuple(self._names)

    def number(self, model: str) -> int:
        """Return the number of a model name."""
        if model not in self._numbers:
            words = normalize_model(model)
            self._numbers[model] = self._names.setdefault(words, len(self._names))
        return self._numbers[model]

    def on(self, node: NodeRecord) -> int:
        """Return the number of the model that a node's labels name."""
        labels = map(node.labels.get, MODEL_LABELS)
        return self.number(next((label for label in labels if label), ""))

    def to_land_on(self, row: PoolRow, devices: Sequence[ExpectedDevice], count: int) -> int:
        """Return the number of the model that a pod would get; each mix has its own number.

        Args:
            row: row of a node.
            devices: the devices of the row's slots.
            count: number of devices that the kubelet has. If there are more, some may not be
                offered, such as a card for displays, and the first model counts.
        """
        if len(devices) > count or not self._are_several(devices):
            return row.model_id
        used = zip(devices, row.used, strict=True)
        free = [device for device, shares in used if shares < row.replicas]
        landing = free if free and row.is_agreed else devices
        if not self._are_several(landing):
            return next((device.model_id for device in landing if device.model_id), row.model_id)
        names = self.names
        return self.number(join_models(names[one.model_id] for one in landing if one.model_id))

    @staticmethod
    def _are_several(devices: Sequence[ExpectedDevice]) -> bool:
        return len({device.model_id for device in devices} - {0}) > 1
