"""Batches built from parts of other batches, compared with batches built from their rows."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest

from extender.core.nodes.batches import batch_in_steps, rearrange_in_steps, take_batch, with_rows
from extender.core.nodes.snapshot import Batch, PoolRow, Telemetry, batch_rows, update_batch
from extender.core.steps import finish
from testkit.builders import GPU, snapshot_of
from tests.extender.core.crowd import crowd

SNAPSHOT = snapshot_of(crowd(300, seed=3))
TELEMETRY = SNAPSHOT.telemetry
ROWS = SNAPSHOT.pools[GPU].rows
NARROW = tuple(row for row in ROWS if len(row.slots) < 8)


def built(rows: Sequence[PoolRow], width: int = 1) -> Batch:
    return batch_rows(tuple(rows), TELEMETRY, np.zeros(len(rows)), width=width)


def columns_of(batch: Batch) -> dict[str, list[object]]:
    """Return all columns of a batch and of its telemetry."""
    parts = ((batch, Batch), (batch.telemetry, Telemetry))
    return {
        f"{kind.__name__}.{column.name}": getattr(part, column.name).tolist()
        for part, kind in parts
        for column in fields(kind)
        if column.init and column.name != "telemetry"
    }


@pytest.mark.parametrize("count", [0, 1, 250, 251, 300])
def test_a_batch_built_in_steps_is_that_of_its_rows(count: int) -> None:
    rows = ROWS[:count]
    width = max((len(row.slots) for row in rows), default=1)

    assert built(rows).slots.shape == (count, width)
    assert columns_of(finish(batch_in_steps(rows, TELEMETRY))) == columns_of(built(rows))


@pytest.mark.parametrize(
    "after",
    [
        pytest.param([*ROWS[5:40], *ROWS[:3]], id="other-order"),
        pytest.param([*NARROW[:9]], id="without-the-widest"),
        pytest.param([*ROWS[100:120], *ROWS[50:60], *ROWS[130:140]], id="with-new-rows"),
        pytest.param([*NARROW[-3:], *ROWS[:30]], id="with-narrower-new-rows"),
        pytest.param([*ROWS[200:210]], id="new-rows-alone"),
        pytest.param([row for row in ROWS if len(row.slots) == 1], id="one-device-each"),
    ],
)
def test_a_rearranged_batch_is_that_of_its_rows(after: list[PoolRow]) -> None:
    before = ROWS[:100]
    place = {row.slots: at for at, row in enumerate(before)}
    index = np.array([place.get(row.slots, -1) for row in after], dtype=np.intp)
    fresh = built([row for row, at in zip(after, index, strict=True) if at < 0])

    found = finish(rearrange_in_steps(built(before), index, fresh, TELEMETRY))

    assert columns_of(found) == columns_of(built(after))


def test_a_batch_with_replaced_or_chosen_rows_is_that_of_its_rows() -> None:
    rows, others, at = list(ROWS[:50]), ROWS[100:103], [7, 2, 40]
    before = built(rows, width=8)
    for place, row in zip(at, others, strict=True):
        rows[place] = row

    after = with_rows(before, at, built(others, width=8))

    assert columns_of(after) == columns_of(built(rows, width=8))
    chosen = take_batch(after, np.array([40, 3]))
    assert columns_of(chosen) == columns_of(built([rows[40], rows[3]], width=8))


def test_an_updated_batch_is_that_of_its_rows_but_for_telemetry() -> None:
    rows = list(ROWS[:50])
    before = built(rows, width=8)
    changed = {3: replace(rows[3], held=1), 9: ROWS[100]}

    after = update_batch(before, changed)

    assert update_batch(before, {}) is before
    for at, row in changed.items():
        rows[at] = row
    expected = replace(built(rows, width=8), telemetry=before.telemetry)
    assert columns_of(after) == columns_of(expected)
