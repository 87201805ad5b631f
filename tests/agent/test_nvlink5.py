"""Errors that NVLink 5 counts link by link; the card is a synthetic one."""

import contextlib

import pynvml
import pytest

from agent.backend import Call, Code, Extra, NvmlError
from agent.dcgm_names import DcgmCollector
from agent.exporter import AgentCollector
from agent.growth import Growth
from agent.nvlink5 import ERRORS, LINK_COUNTERS, RECOVERIES
from agent.nvml import Nvml
from agent.options import Options
from agent.report import Report
from agent.sampler import Sampler
from agent.session import Cadence
from extender.core.readings import Signal
from extender.sources.dcgm import build_table
from tests.agent.blackwell import COUNTERS, LINKS, Blackwell
from tests.agent.replay import Replay, nvml_on

OPTIONS = Options(node="here", cadence=Cadence(slow_seconds=1.0))
SECONDS = 60.0
"""Between two passes."""


def test_the_numbers_are_those_of_the_counters_that_nvml_names() -> None:
    named = {
        getattr(pynvml, name)
        for name in dir(pynvml)
        if name.startswith("NVML_FI_DEV_NVLINK_COUNT_")
        and not name.endswith(("_BER", "_PACKETS", "_BYTES", "_DROPPED"))
        and getattr(pynvml, name) < pynvml.NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER
        and "_RAW_" not in name
    }

    assert set(LINK_COUNTERS) == named == set(COUNTERS)
    assert len({*ERRORS, *RECOVERIES}) == len(LINK_COUNTERS)


def test_the_links_of_a_card_are_added_up() -> None:
    card = Blackwell()
    card.counts.update({(221, 0): 40, (221, 17): 2, (215, 3): 1})

    values = nvml_on(card).read(Call.NVLINK_ERRORS, card.handle)

    assert values[Extra.NVLINK_SYMBOL_ERRORS] == 42.0
    assert values[Extra.NVLINK_RECOVERIES_BEGUN] == 1.0
    assert values[Extra.NVLINK_MALFORMED] == 0.0
    assert len(values) == len(LINK_COUNTERS)
    assert card.asked_of_links == len(LINK_COUNTERS) * (LINKS + 1), "until there are no more"


def test_a_link_that_is_off_counts_nothing() -> None:
    card = Blackwell()
    card.broken = {0: int(Code.NotSupported), 7: int(Code.NotSupported)}
    card.counts.update({(221, 7): 40, (221, 17): 2})

    values = nvml_on(card).read(Call.NVLINK_ERRORS, card.handle)

    assert values[Extra.NVLINK_SYMBOL_ERRORS] == 2.0


def test_a_link_that_cannot_be_read_hides_what_the_others_count() -> None:
    card = Blackwell()
    card.broken[4] = Code.Unknown

    with pytest.raises(NvmlError) as caught:
        nvml_on(card).read(Call.NVLINK_ERRORS, card.handle)

    assert caught.value.code is Code.Unknown


def test_a_card_of_an_older_generation_does_not_support_them() -> None:
    card = Blackwell()
    card.broken = dict.fromkeys(range(LINKS), int(Code.NotSupported))

    with pytest.raises(NvmlError) as caught:
        nvml_on(card).read(Call.NVLINK_ERRORS, card.handle)

    assert caught.value.code is Code.NotSupported


async def passes(card: Replay, *changes: dict[tuple[int, int], int]) -> tuple[Sampler, Report]:
    """Return what is made of a card after a pass before, and one after each change."""

    def clock() -> float:
        return card.now

    with contextlib.closing(Sampler(Nvml(card), OPTIONS, clock=clock, monotonic=clock)) as sampler:
        report = await sampler.sample()
        for change in changes:
            card.now += SECONDS
            if isinstance(card, Blackwell):
                card.counts.update(change)
            report = await sampler.sample()
    return sampler, report


async def test_what_a_card_does_not_support_is_asked_once() -> None:
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
async def test_errors_count_as_wrong_checksums_do(field: int) -> None:
    _, few = await passes(Blackwell(), {(field, 0): 50 * 60})
    _, many = await passes(Blackwell(), {(field, 0): 80 * 60, (field, 9): 70 * 60})

    assert few.devices[0].verdict is not None
    assert few.devices[0].verdict.action == ""
    assert many.devices[0].verdict is not None
    assert (many.devices[0].verdict.action, many.devices[0].verdict.cause) == (
        "exclude-multi-gpu",
        "150 NVLink errors a second",
    )


async def test_what_was_counted_before_says_nothing() -> None:
    card = Blackwell()
    card.counts.update(dict.fromkeys(((field, 2) for field in COUNTERS), 1_000_000))

    _, report = await passes(card, {})

    assert report.signals[Signal.NVLINK_RECOVERY_RATE] == (0.0,)
    assert report.signals[Signal.NVLINK_CRC_RATE] == (0.0,)


async def test_they_are_exported_by_names_of_their_own_and_by_those_of_dcgm() -> None:
    card = Blackwell()
    card.counts.update({(field, 1): field for field in COUNTERS})
    sampler, _ = await passes(card)

    own = {one.name: one for one in AgentCollector(sampler, lambda: card.now).collect()}
    dcgm = {one.name: one for one in DcgmCollector(sampler.latest, lambda: card.now).collect()}

    for field, counter in LINK_COUNTERS.items():
        name = f"idlegpu_agent_{counter.name.removesuffix('_total')}"
        assert [sample.value for sample in own[name].samples] == [field]
        assert [sample.value for sample in dcgm[counter.dcgm].samples] == [field]


def test_the_extender_takes_dcgms_names_of_them_for_the_same() -> None:
    by_name = {metric.name: metric.signal for metric in build_table()}

    for counter in LINK_COUNTERS.values():
        growth = Growth()
        growth.rates({counter.name: 0.0}, 0.0)
        assert set(growth.rates({counter.name: 60.0}, 60.0)) == {by_name[counter.dcgm]}
