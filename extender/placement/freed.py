"""What is known of a node's devices once the pods that preemption would evict are gone."""

from dataclasses import replace

import numpy as np

from extender.core.snapshot import Batch


def with_freed(batch: Batch, freed: list[bool], *, is_any: bool) -> Batch:
    """Return a one-row batch in which nothing is known any more of the freed devices.

    Foreign use ends only where a victim was seen: elsewhere it was there while no pod can have
    held the device, and it stays.

    Args:
        batch: the node without the victims.
        freed: per slot, whether a victim was seen on it.
        is_any: victims held devices, and nobody knows which.
    """
    unknown = np.zeros(batch.slots.shape, dtype=np.bool_)
    unknown[0, : len(freed)] = freed
    is_foreign = batch.telemetry.is_foreign & ~unknown
    unknown |= is_any
    telemetry = replace(
        batch.telemetry,
        freshness=np.where(unknown, 0.0, batch.telemetry.freshness),
        memory_freshness=np.where(unknown, 0.0, batch.telemetry.memory_freshness),
        is_foreign=is_foreign,
        is_in_use=batch.telemetry.is_in_use & ~unknown,
    )
    return replace(batch, telemetry=telemetry)
