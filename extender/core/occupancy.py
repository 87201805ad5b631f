"""Whose memory is in use on a device, as far as readings of the whole device tell.

A device says how much of its memory is in use, and rarely which pod uses it. What pods declared
stays theirs
whether it is in use or not; so what has to be known besides is how much of the rest is in use: by
processes outside Kubernetes and by pods that did not declare. Each reading tells by how much that
can have grown, and what was there before a pod came is not that pod's.
"""

from dataclasses import dataclass

import numpy as np

from extender.core.readings import Column
from extender.core.snapshot import Flags

WHOLE_DEVICE = 1 << 62
"""Declared by the pod that holds a whole device: all of its memory, however much that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Whose memory is in use on each device, by the last reading.

    Attributes:
        used: memory in use, in bytes, NaN where unknown.
        others: the part of it that is not of pods that declared theirs, NaN where unknown.
        foreign: the part of that which no pod holds, NaN where unknown.
    """

    used: Column
    others: Column
    foreign: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """Who may use the memory of each device.

    Attributes:
        declared: what its pods declared in all, in bytes; infinite for a whole device, NaN where
            it is not known yet who holds it.
        has_undeclared: pods that did not declare may hold it.
        is_filling: those of them that the readings do not cover yet are what fills it.
        is_emptying: one of them has left since the last reading.
        is_free: no pod can hold it.
    """

    declared: Column
    has_undeclared: Flags
    is_filling: Flags
    is_emptying: Flags
    is_free: Flags


def account(before: Occupancy, tenancy: Tenancy, used: Column, told_foreign: Column) -> Occupancy:
    """Return whose memory is in use by a new reading.

    What is in use beyond what pods declared is not theirs. What grows besides is taken for theirs,
    for they may have loaded what they declared, unless others have just come.

    Args:
        before: as it was by the reading before.
        tenancy: who may use it.
        used: memory in use now, in bytes.
        told_foreign: what the node's agent knows to be foreign of it, NaN where it does not say.
    """
    is_whole = np.isinf(tenancy.declared)
    beyond = np.where(is_whole, np.nan, np.maximum(used - tenancy.declared, 0.0))
    others = np.fmax(_left(before, tenancy, used), beyond)
    told = np.minimum(told_foreign, used)
    is_told = ~np.isnan(told)
    of_nobody = np.where(tenancy.has_undeclared, np.minimum(before.foreign, others), others)
    foreign = np.where(is_told, told, of_nobody)
    # Where all pods declared theirs, what the agent calls foreign is all that others hold.
    by_told = np.fmax(np.where(tenancy.has_undeclared, others, np.nan), np.fmax(told, beyond))
    others = np.where(is_told, by_told, others)
    return Occupancy(
        used=used,
        others=np.where(tenancy.is_free, used, others),
        foreign=np.where(tenancy.is_free, used, foreign),
    )


def _left(before: Occupancy, tenancy: Tenancy, used: Column) -> Column:
    """Return what others still hold of what they held by the reading before."""
    declared_use = before.used - before.others
    change = used - before.used
    # Processes end whole: what is left in use says whose it was.
    is_others = np.abs(used - declared_use) < np.abs(used - before.others)
    is_others |= tenancy.is_emptying
    after = np.where(is_others, np.maximum(before.others + change, 0.0), before.others)
    grown = np.where(tenancy.is_filling, before.others + change, before.others)
    return np.minimum(np.where(change < 0, after, grown), used)
