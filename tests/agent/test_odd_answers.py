"""An NVML that returns or raises anything at any time: the agent must continue and report."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from agent import report as contract
from agent.dcgm_names import DcgmCollector
from agent.exporter import AgentCollector
from agent.options import Options
from agent.sampler import Sampler
from agent.session import Cadence
from tests.agent.replay import Replay, error, nvml_on

RAISED = (
    *(IndexError("9"), KeyError(3), AttributeError("sVal"), TypeError("t"), ValueError("v")),
    *(MemoryError(), OSError(5, "io"), RecursionError(), OverflowError(), ZeroDivisionError()),
    *(UnicodeDecodeError("utf8", b"\xff", 0, 1, "bad"), StopIteration(), AssertionError()),
    *(error(code) for code in (0, -5, 15, 17, 19, 999, 31_337)),
)
ANSWERED: tuple[object, ...] = (
    *(None, -1, 2**64, -(2**70), float("nan"), float("inf"), True),
    *("", "x" * 100_000, b"\xff\xfe", [], (), {}, [None], object()),
)


class Odd:
    """Wraps the module and sometimes answers in its place."""

    def __init__(self, module: object, seed: int, ratio: float) -> None:
        self._module = module
        self._random = random.Random(seed)
        self._ratio = ratio

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        if not name.startswith("nvml") or not name[4:5].isupper():
            return real
        return lambda *arguments: self._answer(real, arguments)

    def _answer(self, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        drawn = self._random.random()
        if drawn < self._ratio:
            raise self._random.choice(RAISED)
        if drawn < 2 * self._ratio:
            return self._random.choice(ANSWERED)
        return real(*arguments)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ratio", [0.02, 0.2])
async def test_every_pass_ends_in_a_report_for_any_nvml_answer_or_error(
    seed: int, ratio: float
) -> None:
    backend = nvml_on(Replay())
    sound = backend._nvml.module
    backend._nvml.module = Odd(sound, seed, ratio)
    cadence = Cadence(slow_seconds=0.0, process_seconds=0.0, retry_seconds=0.01)
    sampler = Sampler(backend, Options(node="gpu-7", cadence=cadence))
    sampler.watcher.close()  # its threads would consume the same random numbers

    for number in range(1, 16):
        report = await sampler.sample()
        assert contract.decode(contract.encode(report, sent_at=1.0)).sequence == number
        assert list(AgentCollector(sampler, time.time).collect())
        list(DcgmCollector(sampler.latest, time.time).collect())

    backend._nvml.module = sound
    sampler.session._start_at = 0.0
    await sampler.sample()
    report = await sampler.sample()
    sampler.close()
    assert report.problem is None
    readable = [device for device in report.devices if device.uuid.startswith("GPU-0000")]
    assert [device.problem for device in readable] == [None], "it is well as soon as NVML is"
