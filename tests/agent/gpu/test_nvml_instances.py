import ctypes
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agent.gpu.backend import NvmlError
from agent.gpu.nvml import _GpmMeter
from testkit.agent.replay import Replay, nvml_on, refuse


def mig_replay() -> Replay:
    replay = Replay()
    handles = {0: "first", 2: "second"}
    names = {"first": "MIG 3g.71gb", "second": "MIG 1c.2g.35gb"}
    replay.instead["nvmlDeviceGetMigMode"] = lambda _: (1, 1)
    replay.instead["nvmlDeviceGetMaxMigDeviceCount"] = lambda _: 7
    replay.instead["nvmlDeviceGetMigDeviceHandleByIndex"] = lambda _, index: (
        handles[index] if index in handles else refuse(6 if index < 4 else 2)()
    )
    replay.instead["nvmlDeviceGetName"] = lambda handle: f"NVIDIA H200 {names[handle]}"
    replay.instead["nvmlDeviceGetUUID"] = lambda handle: f"MIG-{handle}"
    replay.instead["nvmlDeviceGetGpuInstanceId"] = lambda handle: {"first": 1, "second": 5}[handle]
    return replay


def test_instances_are_listed_with_the_profile_of_their_gpu_instance() -> None:
    card = nvml_on(Replay()).card(0)

    found = nvml_on(mig_replay()).instances(replace(card, has_mig=True))

    assert found is not None
    assert [(one.uuid, one.gpu_instance_id, one.profile) for one in found] == [
        ("MIG-first", 1, "3g.71gb"),
        ("MIG-second", 5, "2g.35gb"),
    ]


def test_a_card_without_mig_has_no_instances() -> None:
    replay = Replay()
    nvml = nvml_on(replay)

    assert nvml.instances(nvml.card(0)) is None
    replay.instead["nvmlDeviceGetMigMode"] = refuse(3)
    assert nvml.instances(nvml.card(0)) is None


def event(handle: Any, xid: int, instance: int = 0xFFFFFFFF, kind: int = 8) -> Any:
    return SimpleNamespace(device=handle, eventType=kind, eventData=xid, gpuInstanceId=instance)


def test_an_xid_names_its_card_even_when_the_card_is_lost() -> None:
    replay = Replay()
    replay.instead["nvmlEventSetCreate"] = lambda: "set"
    replay.instead["nvmlDeviceRegisterEvents"] = lambda *_: None
    nvml = nvml_on(replay)
    card = nvml.card(0)
    source = nvml.events(card)
    again = ctypes.cast(replay.handle, type(replay.handle))  # another handle with the same address
    replay.instead["nvmlEventSetWait_v2"] = lambda *_: event(again, 79)
    replay.instead["nvmlDeviceGetUUID"] = refuse(15)

    found = source.wait(1.0)

    assert found is not None
    assert (found.uuid, found.xid, found.gpu_instance_id) == (card.uuid, 79, None)


def test_xids_are_registered_and_awaited_for_milliseconds() -> None:
    asked: list[tuple[Any, ...]] = []
    replay = Replay()

    def wait(*arguments: Any) -> Any:
        asked.append(arguments)
        return event(replay.handle, 79)

    replay.instead["nvmlEventSetCreate"] = lambda: "set"
    replay.instead["nvmlDeviceRegisterEvents"] = lambda *arguments: asked.append(arguments)
    replay.instead["nvmlEventSetWait_v2"] = wait
    nvml = nvml_on(replay)

    nvml.events(nvml.card(0)).wait(1.5)

    assert asked == [(replay.handle, 8, "set"), ("set", 1500)]


def test_a_timeout_and_other_event_types_return_none() -> None:
    replay = Replay()
    replay.instead["nvmlEventSetCreate"] = lambda: "set"
    replay.instead["nvmlDeviceRegisterEvents"] = lambda *_: None
    nvml = nvml_on(replay)
    source = nvml.events(nvml.card(0))
    replay.instead["nvmlEventSetWait_v2"] = refuse(10)
    assert source.wait(0.0) is None

    replay.instead["nvmlEventSetWait_v2"] = lambda *_: event(replay.handle, 1, kind=4)
    assert source.wait(0.0) is None


def test_an_xid_of_an_instance_has_its_id() -> None:
    replay = Replay()
    replay.instead["nvmlEventSetCreate"] = lambda: "set"
    replay.instead["nvmlDeviceRegisterEvents"] = lambda *_: None
    nvml = nvml_on(replay)
    source = nvml.events(nvml.card(0))
    replay.instead["nvmlEventSetWait_v2"] = lambda *_: event(replay.handle, 43, instance=5)

    found = source.wait(0.0)

    assert found is not None
    assert (found.xid, found.gpu_instance_id) == (43, 5)


def test_an_event_with_an_impossible_xid_is_an_error() -> None:
    replay = Replay()
    replay.instead["nvmlEventSetCreate"] = lambda: "set"
    replay.instead["nvmlDeviceRegisterEvents"] = lambda *_: None
    nvml = nvml_on(replay)
    source = nvml.events(nvml.card(0))
    replay.instead["nvmlEventSetWait_v2"] = lambda *_: event(replay.handle, 2**64 - 1)

    with pytest.raises(ValueError, match="at most 1000"):
        source.wait(0.0)


@pytest.mark.parametrize("code", [3, 15, 999])
def test_a_failed_registration_frees_the_event_set(code: int) -> None:
    freed: list[object] = []
    replay = Replay()
    replay.instead["nvmlEventSetCreate"] = lambda: "set"
    replay.instead["nvmlEventSetFree"] = freed.append
    replay.instead["nvmlDeviceRegisterEvents"] = refuse(code)
    nvml = nvml_on(replay)

    with pytest.raises(NvmlError):
        nvml.events(nvml.card(0))

    assert freed == ["set"]


def raise_index_error(*_: object) -> None:
    raise IndexError("a struct of a newer driver")


@pytest.mark.parametrize("fail", [refuse(999), raise_index_error], ids=["error", "odd-answer"])
def test_a_failed_gpm_sample_leaks_no_memory(fail: Callable[..., None]) -> None:
    replay = Replay()
    taken = iter("abcd")
    freed: list[str] = []
    replay.instead["nvmlGpmSampleAlloc"] = lambda: next(taken)
    replay.instead["nvmlGpmSampleFree"] = freed.append
    replay.instead["nvmlGpmSampleGet"] = lambda *_: None
    meter = _GpmMeter(nvml_on(replay)._nvml, replay.handle, None)
    assert meter.read() == {}

    replay.instead["nvmlGpmSampleGet"] = fail
    for _ in range(2):
        with pytest.raises((NvmlError, IndexError)):
            meter.read()
    meter.close()

    assert sorted(freed) == ["a", "b"]


@pytest.mark.parametrize("code", [3, 13, 25, 26])
def test_a_call_unsupported_by_one_card_is_still_made_for_others(code: int) -> None:
    replay = Replay()
    library = nvml_on(replay)._nvml
    other = replay._pointer()
    requested = []

    def call(handle: Any) -> str:
        def newer() -> str:
            requested.append(handle)
            if handle is not other:
                raise NvmlError("new", code)
            return "newer"

        return str(library.call_with_fallback("new", handle, newer, lambda: "older"))

    again = ctypes.cast(replay.handle, type(replay.handle))  # another handle with the same address
    assert [call(one) for one in (replay.handle, other, again, other)] == [
        *("older", "newer"),
        *("older", "newer"),
    ]
    assert requested == [replay.handle, other, other], "the card without this call is called once"
