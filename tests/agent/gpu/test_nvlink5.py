"""Error counters of NVLink 5 per link, on a synthetic card.

No Blackwell card was available, so nothing here is recorded. The answers follow NVIDIA's headers,
nvidia-ml-py 13.615 and DCGM 4.6: NVLink 5 counts errors in fields 206 to 215, 219 and 221, whose
scope is a link, and does not support the totals of older generations (38, 45, 52, 59). All other
answers are those of the recorded H200.
"""

import contextlib
from collections import Counter
from types import SimpleNamespace
from typing import Any, Final

import pynvml
import pytest

from agent.exporter.dcgm_names import DcgmCollector
from agent.exporter.metrics import AgentCollector
from agent.gpu.backend import (
    LINK_COUNTERS,
    LINK_ERRORS,
    LINK_RECOVERIES,
    Call,
    Code,
    Extra,
    NvmlError,
)
from agent.gpu.card_reader import _CounterRates
from agent.gpu.nvml import Nvml
from agent.gpu.session import Cadence
from agent.options import Options
from agent.report.contract import Report
from agent.sampler import Sampler
from extender.core.devices.readings import Signal
from extender.sources.prometheus.dcgm import build_table
from testkit.agent.replay import Replay, nvml_on

OPTIONS = Options(node="here", cadence=Cadence(slow_seconds=1.0))
SECONDS = 60.0
"""Time between two passes."""
LINKS: Final = 18
COUNTERS: Final = (*range(206, 216), 219, 221)

_SUCCESS, _INVALID_ARGUMENT, _NOT_SUPPORTED = 0, 2, 3
_UNSIGNED_LONG_LONG: Final = 3


class Blackwell(Replay):
    """A synthetic card with NVLink 5.

    Attributes:
        counts: error counters by field and link.
        broken: NVML codes of links that cannot be read, by link.
        asked_of_links: number of link fields read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, int]] = Counter()
        self.broken: dict[int, int] = {}
        self.asked_of_links = 0

    def _nvmlDeviceGetFieldValues(self, _: Any, requested: list[Any]) -> list[Any]:
        return [self._field(*one) if isinstance(one, tuple) else _none(one) for one in requested]

    def _field(self, field: int, link: int) -> Any:
        self.asked_of_links += 1
        if link >= LINKS:
            return _none(field, _INVALID_ARGUMENT)
        if link in self.broken:
            return _none(field, self.broken[link])
        if field not in COUNTERS:
            return _none(field)
        # As in the driver, only the field of the type is valid; others hold garbage.
        value = SimpleNamespace(ullVal=self.counts[field, link], dVal=1e-188)
        return SimpleNamespace(
            fieldId=field, nvmlReturn=_SUCCESS, valueType=_UNSIGNED_LONG_LONG, value=value
        )


def _none(field: int, code: int = _NOT_SUPPORTED) -> Any:
    return SimpleNamespace(fieldId=field, nvmlReturn=code, valueType=0, value=None)


def test_field_ids_match_nvmls_constants() -> None:
    named = {
        getattr(pynvml, name)
        for name in dir(pynvml)
        if name.startswith("NVML_FI_DEV_NVLINK_COUNT_")
        and not name.endswith(("_BER", "_PACKETS", "_BYTES", "_DROPPED"))
        and getattr(pynvml, name) < pynvml.NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER
        and "_RAW_" not in name
    }

    assert set(LINK_COUNTERS) == named == set(COUNTERS)
    assert len({*LINK_ERRORS, *LINK_RECOVERIES}) == len(LINK_COUNTERS)


def test_counters_of_all_links_are_summed() -> None:
    card = Blackwell()
    card.counts.update({(221, 0): 40, (221, 17): 2, (215, 3): 1})

    values = nvml_on(card).read(Call.NVLINK_ERRORS, card.handle)

    assert values[Extra.NVLINK_SYMBOL_ERRORS] == 42.0
    assert values[Extra.NVLINK_RECOVERIES_BEGUN] == 1.0
    assert values[Extra.NVLINK_MALFORMED] == 0.0
    assert len(values) == len(LINK_COUNTERS)
    assert card.asked_of_links == len(LINK_COUNTERS) * (LINKS + 1), "until there are no more"


@pytest.mark.parametrize(
    "code", [Code.NotSupported, Code.NotFound, Code.NoPermission, Code.Deprecated]
)
def test_an_inactive_link_adds_nothing(code: Code) -> None:
    card = Blackwell()
    card.broken = {0: int(code), 7: int(code)}
    card.counts.update({(221, 7): 40, (221, 17): 2})

    values = nvml_on(card).read(Call.NVLINK_ERRORS, card.handle)

    assert values[Extra.NVLINK_SYMBOL_ERRORS] == 2.0


def test_an_unreadable_link_invalidates_the_sum() -> None:
    card = Blackwell()
    card.broken[4] = Code.Unknown

    with pytest.raises(NvmlError) as caught:
        nvml_on(card).read(Call.NVLINK_ERRORS, card.handle)

    assert caught.value.code is Code.Unknown


def test_an_older_card_does_not_support_the_counters() -> None:
    card = Blackwell()
    card.broken = dict.fromkeys(range(LINKS), int(Code.NotSupported))

    with pytest.raises(NvmlError) as caught:
        nvml_on(card).read(Call.NVLINK_ERRORS, card.handle)

    assert caught.value.code is Code.NotSupported


async def passes(card: Replay, *changes: dict[tuple[int, int], int]) -> tuple[Sampler, Report]:
    """Make a first pass, and one after each change of the counters; return the last report."""

    def clock() -> float:
        return float(card.now)

    with contextlib.closing(Sampler(Nvml(card), OPTIONS, clock=clock, monotonic=clock)) as sampler:
        report = await sampler.sample()
        for change in changes:
            card.now += SECONDS
            if isinstance(card, Blackwell):
                card.counts.update(change)
            report = await sampler.sample()
    return sampler, report


async def test_unsupported_counters_are_read_once() -> None:
    card = Blackwell()
    card.broken = dict.fromkeys(range(LINKS), int(Code.NotSupported))

    sampler, _ = await passes(card)
    once = card.asked_of_links
    sampler, _ = await passes(card, {}, {})

    assert once == len(LINK_COUNTERS) * pynvml.NVML_NVLINK_MAX_LINKS
    assert card.asked_of_links == 2 * once, "by two agents"
    assert sampler.session.failures[Call.NVLINK_ERRORS, "NotSupported"] == 1


@pytest.mark.parametrize("field", [213, 214, 215])
async def test_a_link_that_recovers_excludes_pods_with_several_gpus(field: int) -> None:
    _, report = await passes(Blackwell(), {(field, 5): 1})

    verdict = report.devices[0].verdict
    assert verdict is not None
    assert (verdict.action, verdict.cause) == (
        "exclude-multi-gpu",
        "NVLinks that had to recover in the last minutes",
    )


@pytest.mark.parametrize("field", sorted({*COUNTERS} - {213, 214, 215}))
async def test_link_errors_count_like_crc_errors(field: int) -> None:
    _, few = await passes(Blackwell(), {(field, 0): 50 * 60})
    _, many = await passes(Blackwell(), {(field, 0): 80 * 60, (field, 9): 70 * 60})

    assert few.devices[0].verdict is not None
    assert few.devices[0].verdict.action == ""
    assert many.devices[0].verdict is not None
    assert (many.devices[0].verdict.action, many.devices[0].verdict.cause) == (
        "exclude-multi-gpu",
        "150 NVLink errors a second",
    )


async def test_errors_before_the_start_do_not_count() -> None:
    card = Blackwell()
    card.counts.update(dict.fromkeys(((field, 2) for field in COUNTERS), 1_000_000))

    _, report = await passes(card, {})

    assert report.signals[Signal.NVLINK_RECOVERY_RATE] == (0.0,)
    assert report.signals[Signal.NVLINK_CRC_RATE] == (0.0,)


async def test_counters_are_exported_under_own_and_dcgm_names() -> None:
    card = Blackwell()
    card.counts.update({(field, 1): field for field in COUNTERS})
    sampler, _ = await passes(card)

    own = {one.name: one for one in AgentCollector(sampler, lambda: card.now).collect()}
    dcgm = {one.name: one for one in DcgmCollector(sampler.latest, lambda: card.now).collect()}

    for field, counter in LINK_COUNTERS.items():
        name = f"idlegpu_agent_{counter.name.removesuffix('_total')}"
        assert [sample.value for sample in own[name].samples] == [field]
        assert [sample.value for sample in dcgm[counter.dcgm].samples] == [field]


def test_the_extender_maps_dcgms_names_to_the_same_signals() -> None:
    by_name = {metric.name: metric.signal for metric in build_table()}

    for counter in LINK_COUNTERS.values():
        growth = _CounterRates()
        growth.rates({counter.name: 0.0}, 0.0)
        assert set(growth.rates({counter.name: 60.0}, 60.0)) == {by_name[counter.dcgm]}
