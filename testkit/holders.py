"""A world in which pods hold GPUs, read minute by minute."""

from typing import Any

from extender.core.nodes.inventory import PodPhase, PodRecord
from testkit.served import GPU, Gpu
from testkit.whys import WhyWorld

HOUR = 3600.0


class HoldersWorld(WhyWorld):
    """A world whose devices are read again and again."""

    def live(self, cards: dict[str, list[Gpu]], seconds: float, *, every: float = 60.0) -> None:
        """Read the devices and look at them while time passes."""
        until = self.now + seconds
        while self.now < until:
            self.now += every
            self.tell(cards)
            self.why.idleness.look()

    def hold(self, name: str, node: str, gpus: int, namespace: str = "team", **rest: Any) -> None:
        values: dict[str, Any] = {
            "phase": PodPhase.RUNNING,
            "resources": {GPU: gpus},
            "bound_at": self.now - 600.0,
            "started_at": self.now - 600.0,
            "owner": "StatefulSet notebook",
            **rest,
        }
        self.fleet.apply_pod(
            PodRecord(uid=f"uid-{name}", namespace=namespace, name=name, node=node, **values)
        )


def card(*tenants: str, busy: float = 0.0, used_gib: float = 0.0) -> Gpu:
    return Gpu(busy=busy, used_gib=used_gib, tenants=tenants)
