"""What a node is once pods that are being deleted, or would be evicted, are gone from it."""

from dataclasses import replace

import numpy as np

from extender.core.landing import assume, closed_slots
from extender.core.snapshot import Batch, Leaving, Ratios, Telemetry, Tenant, batch_rows


def batch_after(
    leaving: Leaving,
    tenants: tuple[Tenant, ...],
    telemetry: Telemetry,
    suspicion: Ratios,
    *,
    is_presumed_idle: bool,
) -> Batch:
    """Return a node as a batch of one row, as if readings showed already that some pods are gone.

    They release what was theirs, and nothing else. Foreign use stays where it was seen before they
    came: nobody has seen its end. What is read of a device after their end says how busy it is, for
    an ended pod does nothing; its memory may show for a while.

    Args:
        leaving: the node without these pods.
        tenants: tentative tenants of it.
        telemetry: of every device.
        suspicion: of the node, an array of one.
        is_presumed_idle: what has just been freed counts as idle, as what it was made free for,
            unless it was in use or active before they came; else it is unknown how busy it is.
    """
    row = assume(leaving.row, tenants, closed_slots(leaving.row, telemetry.is_out))
    batch = batch_rows((row,), telemetry, suspicion)
    seen = batch.telemetry
    freed = np.array([leaving.freed], dtype=np.bool_)
    size = seen.memory_total_bytes
    used = seen.memory_used * size
    released = np.minimum(np.array([leaving.released_bytes]), used)
    others = np.maximum(seen.others_bytes - np.array([leaving.released_others]), 0.0)
    # Of what has been freed nothing is measured; what others hold is known from before.
    used = np.where(freed, others, used - released)
    free = np.where(freed, size - others, seen.memory_free_bytes + released)
    was_foreign = np.array([leaving.foreign], dtype=np.bool_)
    was_active = was_foreign | np.array([leaving.active], dtype=np.bool_)
    is_read = np.array([leaving.ended], dtype=np.bool_) & (seen.freshness > 0)
    unread = freed & ~is_read
    # Memory that pods give back late is taken for foreign meanwhile.
    is_late = freed & (released > 0) & ~was_foreign
    after = replace(
        seen,
        utilization=np.where(unread, 0.0, seen.utilization),
        latest=np.where(unread, 0.0, seen.latest),
        # Nor is it the foreign use by which the last minutes would count.
        peak=np.where(
            unread, 0.0, np.where(is_late, np.minimum(seen.peak, seen.latest), seen.peak)
        ),
        presumed=np.where(unread, 0.0, seen.presumed),
        freshness=np.where(unread, is_presumed_idle & ~was_active, seen.freshness),
        memory_used=used / np.where(size > 0, size, np.inf),
        memory_free_bytes=free,
        memory_freshness=np.where(freed, size > 0, seen.memory_freshness),
        others_bytes=others,
        is_foreign=np.where(unread, was_foreign, seen.is_foreign & ~is_late),
        is_in_use=seen.is_in_use & ~freed,
    )
    return replace(batch, telemetry=after)
