"""A cluster in which pods wait, and a waker that looks at them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from typing_extensions import override

from extender.core.nodes.inventory import PodRecord
from extender.effects.wake_plan import WakePace
from extender.effects.waker import Waker
from extender.kube.client import KubeClient
from extender.settings.wake import Wake
from testkit.builders import GPU
from testkit.fake_kube import FakeKube
from testkit.world import IDLE, World

OBJECTS = "/apis/storage.k8s.io/v1/namespaces/ours/csistoragecapacities"
EAGER = Wake()
QUICK = WakePace(confirmations=1, check_seconds=0.1, min_interval_seconds=0.1)
IDLE_ONLY = (("idlegpu.io/require-idle", "true"),)


class Leading:
    """Leads, or not, and counts how often it was asked."""

    def __init__(self, *, leads: bool = True) -> None:
        self.leads = leads
        self.asked = 0

    @property
    def is_held(self) -> bool:
        self.asked += 1
        return self.leads

    async def run(self) -> None:
        await asyncio.Event().wait()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorder(KubeClient):
    """Notes what is asked of the API server, where the fake one knows no such object."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []

    @override
    async def send(self, method: str, path: str, body: object, **how: Any) -> bytes:
        assert body
        self.asked.append((method, path, str(how["action"])))
        return b""

    @override
    async def get(self, path: str, params: object, **how: Any) -> dict[str, object]:
        assert not params
        self.asked.append(("GET", path, str(how["action"])))
        return {"metadata": {"resourceVersion": "1"}, "spec": {}}


def waits(world: World, name: str = "p", **changes: Any) -> PodRecord:
    """Let the watch show a pod that waits for idle GPUs because we refused it."""
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
    world.read_after(10.0)


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
        leader=leading or Leading(),
        pace=pace,
        monotonic=clock or Clock(),
    )


def told(kube: FakeKube) -> list[str]:
    """Return what was written, without its time."""
    texts = [body["metadata"]["annotations"]["idlegpu.io/state"] for _, _, body in kube.writes]
    return [text.rpartition("; ")[0] for text in texts]


def count_ranks(world: World) -> list[object]:
    """Note the request of each question to the placer from now on."""
    asked: list[object] = []
    rank = world.placer.rank

    def counted(about: Any, *args: Any, **named: Any) -> object:
        asked.append(about)
        return rank(about, *args, **named)

    world.placer.rank = counted  # type: ignore[method-assign, assignment] # and asks on
    return asked


@contextlib.asynccontextmanager
async def running(waking: Waker) -> AsyncIterator[None]:
    task = asyncio.create_task(waking.run(), name="waker")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
