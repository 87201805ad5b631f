import time
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from extender.sources.kubernetes.objects import _STEP_SECONDS, ObjectCache, Pacer

changes = st.lists(st.tuples(st.sampled_from("abcd"), st.none() | st.integers(0, 2)), max_size=12)


class Copy:
    """Records of a sink, as the cache reported them."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, int]] = {}
        self.object_cache: ObjectCache[tuple[str, int]] = ObjectCache(
            self.change, replace=self.replace
        )

    def replace(self, records: Iterable[tuple[str, int]]) -> None:
        self.held.clear()
        self.held.update((record[0], record) for record in records)

    def change(
        self, key: str, before: tuple[str, int] | None, after: tuple[str, int] | None
    ) -> None:
        assert before != after, "an equal record was reported twice"
        assert before == self.held.pop(key, None)
        if after is not None:
            self.held[key] = after

    def watch(self, key: str, value: int | None) -> None:
        self.object_cache.put(key, None if value is None else (key, value))

    async def list(
        self, objects: dict[str, int], late: Iterable[tuple[str, int | None]] = ()
    ) -> None:
        for key, value in objects.items():
            self.object_cache.add_listed(key, (key, value))
        for key, late_value in late:
            self.watch(key, late_value)
        await self.object_cache.end_list(Pacer())


def apply_all(objects: dict[str, int], calls: list[tuple[str, int | None]]) -> dict[str, int]:
    after = dict(objects)
    for key, value in calls:
        if value is None:
            after.pop(key, None)
        else:
            after[key] = value
    return after


@given(changes, changes, changes, changes)
async def test_a_list_corrects_missed_changes_and_keeps_newer_ones(
    first: list[tuple[str, int | None]],
    lost: list[tuple[str, int | None]],
    meanwhile: list[tuple[str, int | None]],
    late: list[tuple[str, int | None]],
) -> None:
    copy = Copy()
    objects = apply_all({}, first)
    copy.object_cache.begin_list()
    await copy.list(objects)

    copy.object_cache.begin_list()
    objects = apply_all(objects, lost)
    for key, value in meanwhile:
        copy.watch(key, value)
    await copy.list(objects, late)

    now = apply_all(objects, meanwhile + late)
    truth = {key: (key, value) for key, value in now.items()}
    assert copy.held == truth
    assert copy.object_cache.records == truth


async def test_an_incomplete_list_changes_nothing() -> None:
    copy = Copy()
    copy.object_cache.begin_list()
    await copy.list({"a": 1})

    copy.object_cache.begin_list()
    copy.object_cache.add_listed("b", ("b", 1))
    copy.object_cache.abort_list()

    assert copy.held == {"a": ("a", 1)}


def test_an_object_that_becomes_irrelevant_is_removed() -> None:
    copy = Copy()
    copy.watch("a", 1)

    copy.watch("a", None)
    copy.watch("never held", None)

    assert copy.held == {}


async def test_without_replace_the_first_list_is_reported_record_by_record_in_steps() -> None:
    turns: list[int] = []
    reported: list[int] = []

    async def yield_control() -> None:
        turns.append(len(reported))

    def report(_: str, before: int | None, after: int | None) -> None:
        assert before is None
        assert after is not None
        reported.append(after)
        time.sleep(2 * _STEP_SECONDS)

    object_cache: ObjectCache[int] = ObjectCache(report)
    object_cache.begin_list()
    for number in range(3):
        object_cache.add_listed(str(number), number)

    await object_cache.end_list(Pacer(yield_control))
    assert (reported, turns) == ([0, 1, 2], [1, 2, 3])
