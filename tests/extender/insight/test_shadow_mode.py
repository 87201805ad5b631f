"""Shadow mode, decision log and regret follow the settings of a running extender."""

import asyncio
from pathlib import Path

from extender.insight.decision_log.reader import LoggedBinding, LoggedDecision, read_log
from extender.insight.shadow_mode import ShadowMode
from extender.runtime.metrics import Metrics
from extender.server.request_tracker import RequestTracker
from extender.settings.config import Settings
from extender.settings.service import DecisionLog, Mode, RegretSettings
from testkit.world import World


def small() -> World:
    world = World()
    for index in range(2):
        world.add_node(f"node-{index}", 1)
    world.read()
    return world


def bind(world: World, shadow_mode: ShadowMode, name: str) -> None:
    """Place a pod, and bind it to node-1."""
    world.place(name)
    for record in world.history:
        world.placer.detail(record)
    bound = world.bind(name, "node-1")
    decided = world.history.note_bound(bound.uid, "node-1")
    assert decided is not None
    shadow_mode.note_bound(decided)
    shadow_mode.note_own(decided)


async def test_the_mode_may_be_changed_while_it_runs() -> None:
    world, metrics = small(), Metrics()
    ShadowMode(Settings(), world.placer, metrics, world.clock, RequestTracker())
    assert metrics.registry.get_sample_value("idlegpu_shadow_mode") == 0

    world.placer.adopt(Settings(mode=Mode.SHADOW))
    world.place("a")

    assert len(world.fleet.ledger) == 0
    assert metrics.registry.get_sample_value("idlegpu_shadow_mode") == 1
    world.placer.adopt(Settings())
    world.place("b")
    assert len(world.fleet.ledger) == 1


async def test_a_log_may_be_begun_moved_and_ended_while_it_runs(tmp_path: Path) -> None:
    world, metrics = small(), Metrics()
    shadow_mode = ShadowMode(Settings(), world.placer, metrics, world.clock, RequestTracker())
    world.place("unlogged")
    first, second = tmp_path / "first", tmp_path / "second"

    await shadow_mode.adopt(Settings(decision_log=DecisionLog(path=str(first))))
    bind(world, shadow_mode, "a")
    await shadow_mode.adopt(Settings(decision_log=DecisionLog(path=str(second))))
    world.place("b")
    await shadow_mode.adopt(Settings())
    world.place("c")

    reported = [
        (line.uid if isinstance(line, LoggedBinding) else line.pod.uid)
        for line in read_log([first, second])
    ]
    assert reported == ["uid-a", "uid-a", "uid-a", "uid-b", "uid-b"]
    assert [type(line) for line in read_log([first])] == [
        LoggedDecision,
        LoggedDecision,
        LoggedBinding,
    ]
    assert shadow_mode.log is None


async def test_log_problems_degrade_shadow_mode(tmp_path: Path) -> None:
    world = small()
    settings = Settings(decision_log=DecisionLog(path=str(tmp_path / "none" / "log")))
    shadow_mode = ShadowMode(settings, world.placer, Metrics(), world.clock, RequestTracker())
    assert shadow_mode.degraded() == {}

    world.place("a")
    assert shadow_mode.log is not None
    await asyncio.to_thread(shadow_mode.log.close)

    assert shadow_mode.degraded() == {
        "decision_log": "cannot be written: No such file or directory"
    }


async def test_bound_pods_are_watched() -> None:
    world = small()
    settings = Settings(regret=RegretSettings(pods=5))
    shadow_mode = ShadowMode(settings, world.placer, Metrics(), world.clock, RequestTracker())

    bind(world, shadow_mode, "a")

    assert shadow_mode.regret.take_next()
    assert len(shadow_mode.regret) == 1
    await shadow_mode.adopt(Settings(regret=RegretSettings(pods=0)))
    bind(world, shadow_mode, "b")
    assert not shadow_mode.regret.take_next()
