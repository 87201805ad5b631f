"""Cluster with waiting pods, and a waker for them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

from typing_extensions import override

from extender.core.nodes.inventory import PodRecord
from extender.effects.wake_plan import WakePace
from extender.effects.waker import Waker
from extender.kube.client import KubeClient
from extender.kube.lease import Lease
from extender.settings.service import Wake
from testkit.builders import GPU
from testkit.fake_kube import FakeKube
from testkit.world import IDLE, World

OBJECTS = "/apis/storage.k8s.io/v1/namespaces/ours/csistoragecapacities"
EAGER = Wake()
QUICK = WakePace(confirmations=1, check_seconds=0.1, min_interval_seconds=0.1)
IDLE_ONLY = (("idlegpu.io/require-idle", "true"),)


class Leading:
    """Leader election whose result the test sets; counts its calls."""

    def __init__(self, *, leads: bool = True) -> None:
        self.leads = leads
        self.requested = 0

    @property
    def is_held(self) -> bool:
        self.requested += 1
        return self.leads

    async def run(self) -> None:
        await asyncio.Event().wait()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorder(KubeClient):
    """Recorder of requests to the API server for objects that the fake one lacks."""

    def __init__(self) -> None:
        self.requested: list[tuple[str, str, str]] = []

    @override
    async def send(self, method: str, path: str, body: object, **how: Any) -> bytes:
        assert body
        self.requested.append((method, path, str(how["action"])))
        return b""

    @override
    async def get(self, path: str, **how: Any) -> dict[str, object]:
        self.requested.append(("GET", path, str(how["action"])))
        return {"metadata": {"resourceVersion": "1"}, "spec": {}}


def waits(world: World, name: str = "p", **changes: Any) -> PodRecord:
    """Report a pod that waits for idle GPUs because the extender refused it, as the watch would."""
    described = PodRecord(
        uid=f"uid-{name}",
        namespace="ns",
        name=name,
        resources={GPU: 1},
        is_unscheduled=True,
        is_refused=True,
        wishes=IDLE_ONLY,
    )
    record = replace(described, **changes)
    world.fleet.apply_pod(record)
    return record


def turn_idle(world: World, node: str) -> None:
    world.card(node).values = dict(IDLE)
    for _ in range(2):  # no pod held it: one reading ends no foreign use
        world.read_after(5.0)


def waker(
    client: KubeClient,
    world: World,
    settings: Wake = EAGER,
    pace: WakePace = QUICK,
    *,
    leading: Leading | None = None,
    clock: Clock | None = None,
) -> Waker:
    return Waker(
        client,
        world.placer,
        settings,
        namespace="ours",
        lease=cast(Lease, leading or Leading()),
        pace=pace,
        monotonic=clock or Clock(),
    )


def wakes(kube: FakeKube) -> list[str]:
    """Return the written annotations, without their times."""
    texts = [body["metadata"]["annotations"]["idlegpu.io/state"] for _, _, body in kube.writes]
    return [text.rpartition("; ")[0] for text in texts]


def count_ranks(world: World) -> list[object]:
    """Record the GPU request of each later call of the placer."""
    requested: list[object] = []
    rank = world.placer.rank

    def counted(about: Any, *args: Any, **named: Any) -> object:
        requested.append(about)
        return rank(about, *args, **named)

    world.placer.rank = counted  # type: ignore[method-assign, assignment] # calls the original
    return requested


@contextlib.asynccontextmanager
async def running(waking: Waker) -> AsyncIterator[None]:
    task = asyncio.create_task(waking.run(), name="waker")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
