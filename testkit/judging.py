"""Classify pods that were bound without a request, with the test's own inventory and clock."""

from dataclasses import dataclass, field, replace
from typing import Any

from extender.core.nodes.inventory import PodRecord
from extender.placement.binding_attribution import BindingAttribution, InventoryTap
from extender.placement.bypassed_pods import _GRACE_SECONDS, BypassedPods
from extender.placement.request_log import FILTER, AnsweredRequest
from extender.settings.service import BypassSettings
from testkit.builders import GPU
from testkit.world import World

DEFAULT = "default-scheduler"


@dataclass
class ReceivedPeriod:
    """Period in which every message of other replicas was received."""

    since: float = float("-inf")
    until: float = float("inf")


@dataclass
class BindingWorld:
    """Bypassed pods and binding attribution of a world; the test supplies the inventory."""

    settings: BypassSettings = field(default_factory=BypassSettings)
    received: ReceivedPeriod | None = None

    def __post_init__(self) -> None:
        self.world = World()
        self.bypassed_pods = BypassedPods(
            self.world.request_log, self.world.metrics, self.settings, peers=self.received
        )
        self.binding_attribution = BindingAttribution(
            self.world.request_log, self.world.history, self.world.metrics, peers=self.received
        )
        self.tap = InventoryTap(
            self.world.fleet, self.world.history, self.binding_attribution, self.bypassed_pods
        )
        self.bypassed_pods.sweep()

    def pod(self, name: str = "p", **rest: Any) -> PodRecord:
        values: dict[str, Any] = {"resources": {GPU: 1}, **rest}
        return PodRecord(uid=f"uid-{name}", namespace="team", name=name, **values)

    def call(self, name: str = "p", verb: str = FILTER, **rest: Any) -> None:
        values: dict[str, Any] = {"choices": 1, **rest}
        self.world.request_log.note(
            AnsweredRequest(
                verb=verb, uid=f"uid-{name}", key=f"team/{name}", at=self.world.now, **values
            )
        )

    def create(self, record: PodRecord) -> None:
        self.tap.apply_pod(record)
        self.world.now += 0.1

    def bind(self, record: PodRecord) -> None:
        self.tap.apply_pod(replace(record, node="a"))
        self.world.now += 0.1

    def judge(self) -> None:
        """Advance the clock until pods are classified."""
        self.world.now += _GRACE_SECONDS
        self.bypassed_pods.sweep()

    def counted(self, reason: str = "not-called", scheduler: str = DEFAULT) -> float:
        return self.world.count("idlegpu_pods_bypassed_total", scheduler=scheduler, reason=reason)

    @property
    def unjudged(self) -> float:
        return self.world.count("idlegpu_pods_bound_unjudged_total")
