"""GPM: what a card counted of its own activity between two samples (Hopper and later)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from agent.backend import Code, Extra, Handle, NvmlError, Values
from agent.nvml_library import Library
from extender.core.readings import Signal

_MIB: Final = float(1 << 20)
_METRICS: Final[Mapping[int, tuple[str, float]]] = MappingProxyType(
    {
        1: (Signal.GRAPHICS_ACTIVE, 0.01),
        2: (Signal.SM_ACTIVE, 0.01),
        3: (Extra.SM_OCCUPANCY, 0.01),
        5: (Signal.TENSOR_ACTIVE, 0.01),
        10: (Signal.DRAM_ACTIVE, 0.01),
        20: (Extra.PCIE_SENT, _MIB),
        21: (Extra.PCIE_RECEIVED, _MIB),
        60: (Extra.NVLINK_RECEIVED, _MIB),
        61: (Extra.NVLINK_SENT, _MIB),
    }
)
"""NVML's numbers of metrics, and what makes base units of them."""


class GpmMeter:
    """The last two samples of a card or a GPU instance.

    Args:
        nvml: the library.
        handle: of the card.
        gpu_instance_id: None for the whole card.
    """

    def __init__(self, nvml: Library, handle: Handle, gpu_instance_id: int | None) -> None:
        self._nvml = nvml
        self._handle = handle
        self._gpu_instance_id = gpu_instance_id
        self._older: Any = None
        self._spare: Any = None

    def read(self) -> Values:
        """Return activity since the last call; nothing the first time.

        Raises:
            NvmlError: the card cannot be asked; the next call is a first one again.
        """
        sample = self._spare if self._spare is not None else self._nvml.ask("nvmlGpmSampleAlloc")
        older, self._older, self._spare = self._older, None, sample
        try:
            if self._gpu_instance_id is None:
                self._nvml.ask("nvmlGpmSampleGet", self._handle, sample)
            else:
                self._nvml.ask("nvmlGpmMigSampleGet", self._handle, self._gpu_instance_id, sample)
        except NvmlError:
            if older is not None:
                self._nvml.ask("nvmlGpmSampleFree", older)
            raise
        self._older, self._spare = sample, older
        return {} if older is None else self._between(older, sample)

    def _between(self, older: Any, newer: Any) -> Values:
        module = self._nvml.module
        question = module.c_nvmlGpmMetricsGet_t()
        question.version = module.NVML_GPM_METRICS_GET_VERSION
        question.sample1, question.sample2 = older, newer
        question.numMetrics = len(_METRICS)
        for at, metric in enumerate(_METRICS):
            question.metrics[at].metricId = metric
        answer = self._nvml.ask("nvmlGpmMetricsGet", question)
        values: dict[str, float] = {}
        for at, (name, factor) in enumerate(_METRICS.values()):
            item = answer.metrics[at]
            if item.nvmlReturn == Code.Success and item.value >= 0:  # which NaN is not
                values[name] = item.value * factor
        return values

    def close(self) -> None:
        """Give the samples back."""
        for sample in (self._older, self._spare):
            if sample is not None:
                self._nvml.ask("nvmlGpmSampleFree", sample)
        self._older = self._spare = None
