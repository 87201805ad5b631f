"""Metrics for operators: waiting pods by reason, and their longest wait."""

from typing import Any

import pytest

from extender.api.status_routes import FleetCollector
from extender.insight.pending import Waits
from testkit.builders import GPU
from testkit.world import World


@pytest.fixture
def world() -> World:
    world = World()
    world.metrics.registry.register(
        FleetCollector(world.fleet, tuple, lambda: 0, lambda: world.now)
    )
    return world


def waiting(world: World, name: str, seconds: float, **rest: Any) -> None:
    values: dict[str, Any] = {"resources": {GPU: 1}, "is_unscheduled": True, **rest}
    world.add_waiting(name, created_at=world.now - seconds, **values)


def found(world: World, **labels: str) -> tuple[float, float]:
    """Return the number of pods and the longest wait of one series."""
    usual = {"namespace": "team", "resource": GPU, "model": "any", "size": "1"}
    every = {**usual, "refused_by": "kube-scheduler", **labels}
    return (
        world.count("idlegpu_unplaced_pods", **every),
        world.count("idlegpu_unplaced_longest_seconds", **every),
    )


def test_pods_are_counted_by_namespace_and_request_with_the_longest_wait(world: World) -> None:
    waiting(world, "a", 60)
    waiting(world, "b", 7200)
    waiting(world, "c", 30, namespace="other", resources={GPU: 8}, wanted_model="h100")

    waiting(world, "d", 0.5, namespace="new")
    waiting(world, "e", -5, namespace="next")  # created in the future by the API server's clock

    assert found(world) == (2, 7200)
    assert found(world, namespace="other", model="h100", size="8") == (1, 30)
    assert found(world, namespace="new") == (1, 0.5)
    assert found(world, namespace="next") == (1, 0)


def test_pods_that_idlegpu_refused_are_counted_apart(world: World) -> None:
    waiting(world, "a", 60)
    waiting(world, "b", 90, is_refused=True)

    assert found(world) == (1, 60)
    assert found(world, refused_by="idlegpu") == (1, 90)


def test_a_pod_that_needs_no_further_node_does_not_wait(world: World) -> None:
    waiting(world, "a", 60, is_gated=True)
    waiting(world, "b", 60, nominated_node="n")

    assert found(world) == (0, 0)


def test_namespaces_with_few_waiting_pods_share_a_series(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extender.insight.pending._MAX_NAMESPACES", 1)
    waiting(world, "a", 60)
    waiting(world, "b", 60)
    waiting(world, "c", 10, namespace="small")
    waiting(world, "d", 20, namespace="smaller")
    waiting(world, "e", 0.5, namespace="small", resources={GPU: 2})

    assert found(world) == (2, 60)
    assert found(world, namespace="other") == (2, 20)
    assert found(world, namespace="other", size="2") == (1, 0.5)


def test_pods_are_counted_in_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extender.insight.pending._PIECE_PODS", 2)
    for number in range(5):
        waiting(world, f"p{number}", 60)

    assert sum(1 for _ in Waits(world.now).add_in_steps(world.fleet.pods.values())) == 3
