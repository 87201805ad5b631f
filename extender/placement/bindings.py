"""Record on which nodes pods were bound."""

import logging
from collections.abc import Callable, Iterable

from extender.core.nodes.inventory import PodRecord
from extender.fleet.fleet import Fleet
from extender.placement.binding_attribution import BindingAttribution
from extender.placement.bypassed_pods import BypassedPods
from extender.placement.history import DecisionHistory, DecisionRecord

logger = logging.getLogger(__name__)


class InventoryTap:
    """Forwards inventory changes to the fleet, and records the node of each newly bound pod.

    Args:
        fleet: state of the fleet.
        history: decisions of this replica.
        binding_attribution: counts whether decisions were followed.
        bypassed_pods: finds pods that were bound without a request to idlegpu.
        on_bound: called with the decision of each newly bound pod.
    """

    def __init__(
        self,
        fleet: Fleet,
        history: DecisionHistory,
        binding_attribution: BindingAttribution,
        bypassed_pods: BypassedPods,
        on_bound: Callable[[DecisionRecord], None] = lambda _: None,
    ) -> None:
        self._on_bound = on_bound
        self._fleet = fleet
        self._history = history
        self._binding_attribution = binding_attribution
        self._bypassed_pods = bypassed_pods
        self.replace_nodes = fleet.replace_nodes
        self.apply_node = fleet.apply_node
        self.remove_node = fleet.remove_node
        self.apply_host_use = fleet.apply_host_use
        self.apply_group_size = fleet.apply_group_size

    def replace_pods(self, records: Iterable[PodRecord]) -> None:
        """Replace all GPU pods."""
        listed = list(records)
        noted = [(record, self._decided(record)) for record in listed]
        self._fleet.replace_pods(listed)
        for record, decided in noted:
            self._note(record, decided)
        self._bypassed_pods.relist(listed)

    def apply_pod(self, record: PodRecord) -> None:
        """Add or update a GPU pod."""
        decided = self._decided(record)
        self._fleet.apply_pod(record)
        self._note(record, decided)
        self._bypassed_pods.see(record)

    def remove_pod(self, uid: str, at: float) -> None:
        """Remove a pod that was gone by `at`, seconds since the epoch."""
        self._fleet.remove_pod(uid, at)
        self._bypassed_pods.remove(uid)
        self._history.take_choice(uid)

    def _decided(self, record: PodRecord) -> DecisionRecord | None:
        """Return the decision of a newly bound pod; call this before the pod counts on its node."""
        return self._history.note_bound(record.uid, record.node) if record.node else None

    def _note(self, record: PodRecord, decided: DecisionRecord | None) -> None:
        if not record.node:
            return
        if decided is not None:
            self._on_bound(decided)
        choice = self._history.take_choice(record.uid)
        if choice is None:
            return
        self._binding_attribution.note(record.uid, choice, record.node)
        logger.info(
            "bound",
            extra={"pod": record.key, "node": record.node, "first_choice": choice.best},
        )
