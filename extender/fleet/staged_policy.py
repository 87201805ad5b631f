"""Allocate all nodes under another policy, in cooperative steps, before it comes into force.

Nodes may change between the steps. Answers use the policy in force until then, and nodes that have
changed are allocated again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.core.nodes.snapshot import Pool, PoolRow, Rows, update_batch
from extender.core.policy import Policy
from extender.core.steps import Steps
from extender.fleet.allocation import NodeAllocations
from extender.fleet.device_holders import DeviceUse, has_unsettled_pods
from extender.fleet.store import DeviceStore

_PIECE_NODES = 512
"""Nodes whose rows are written into a pool per cooperative step: a few milliseconds."""

_WIDTH = 1 + len(DeviceUse._fields)


class StagedPolicy:
    """Allocations of all nodes under another policy.

    Args:
        allocations: allocations under the policy in force.
        policy: the other policy.
    """

    def __init__(self, allocations: NodeAllocations, policy: Policy) -> None:
        self.policy = policy
        self._allocations = allocations
        self._made_of: dict[str, Mapping[str, PoolRow]] = {}
        self._rows: dict[str, dict[str, PoolRow]] = {}
        self._unsettled: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._count = 0
        self._uses: list[Rows] = []
        self._bases: Mapping[str, Pool] = {}
        self._pools: dict[str, Pool] = {}

    def outdated(self) -> list[str]:
        """Return the nodes that were not added, or whose allocation has changed since."""
        return [
            name
            for name, rows in self._allocations.rows.items()
            if self._made_of.get(name) is not rows
        ]

    def add(self, nodes: Iterable[tuple[NodeRecord, Sequence[PodRecord]]]) -> None:
        """Allocate some nodes, each given with the pods that hold devices on it."""
        uses: list[tuple[int, *DeviceUse]] = []
        for node, pods in nodes:
            name = node.name
            self._made_of[name] = self._allocations.rows[name]
            self._rows[name], devices = self._allocations.allocate_under(node, pods, self.policy)
            (
                self._unsettled.add
                if has_unsettled_pods(self._rows[name])
                else self._unsettled.discard
            )(name)
            self._numbers[name] = self._count
            uses += [(self._count, *device) for device in devices]
            self._count += 1
        self._uses.append(np.array(uses, dtype=np.intp).reshape(-1, _WIDTH))

    def patch(self, pools: Mapping[str, Pool]) -> Steps[None]:
        """Put the staged rows into a snapshot's pools."""
        self._bases = pools
        for resource, pool in pools.items():
            rows, batch = list(pool.rows), pool.batch
            for start in range(0, len(rows), _PIECE_NODES):
                changed = {}
                for at, name in enumerate(pool.nodes[start : start + _PIECE_NODES], start):
                    row = self._rows.get(name, {}).get(resource)
                    # If the devices have changed, the pool is built from scratch anyway.
                    if row is not None and row.slots == rows[at].slots:
                        changed[at] = rows[at] = row
                batch = update_batch(batch, changed)
                yield
            self._pools[resource] = replace(pool, rows=tuple(rows), batch=batch)
        self._uses = [np.concatenate(self._uses)] if self._uses else []
        yield

    def put_in_force(self, store: DeviceStore) -> list[str]:
        """Put the staged allocations in force; return the nodes that have changed since."""
        outdated = self.outdated()
        current = self._rows.keys() & self._allocations.rows.keys() - set(outdated)
        self._allocations.adopt(
            self.policy, {name: self._rows[name] for name in current}, self._unsettled & current
        )
        is_current = np.zeros(self._count, dtype=np.bool_)
        is_current[[self._numbers[name] for name in current]] = True
        uses = np.concatenate(self._uses) if self._uses else np.zeros((0, _WIDTH), dtype=np.intp)
        store.set_tenancy(uses[is_current[uses[:, 0]], 1:])
        return outdated

    def pools_for(self, pools: Mapping[str, Pool]) -> Mapping[str, Pool] | None:
        """Return the patched pools, None if the pools' nodes or devices have changed since."""
        is_same = pools.keys() == self._pools.keys() and all(
            pool.nodes is self._bases[resource].nodes
            and pool.batch.slots is self._bases[resource].batch.slots
            for resource, pool in pools.items()
        )
        return self._pools if is_same else None


def is_allocated_by(policy: Policy) -> tuple[object, ...]:
    """Return the settings that affect allocations."""
    return policy.assumed, policy.shared_policy
