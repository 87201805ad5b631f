"""Test that the difference between two mappings is found, with any hint where to look."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.readings import ChangedTenants, DeviceKey, Readings
from extender.fleet.device_holders import HolderSources, _HoldersChange, _PodsByDevice

devices = st.sampled_from("abcde").map(lambda uuid: DeviceKey((uuid, "")))
mappings = st.dictionaries(devices, st.sampled_from([("ns/x",), ("ns/y",), ("ns/x", "ns/y")]))
MAX_AGE = 60.0


def answer_with(mapping: _PodsByDevice | None, changed: ChangedTenants | None = None) -> Readings:
    return Readings(
        source="prometheus",
        at=0.0,
        devices=(),
        columns={},
        measured_at=np.zeros(0),
        tenants=mapping,
        changed_tenants=changed,
    )


def differing(before: _PodsByDevice, after: _PodsByDevice) -> set[DeviceKey]:
    return {key for key in {**before, **after} if before.get(key) != after.get(key)}


def found(replaced: _HoldersChange | None) -> set[DeviceKey]:
    assert replaced is not None
    return set(filter(replaced.has_changed, replaced.devices))


@given(st.lists(st.tuples(mappings, st.booleans(), st.booleans()), max_size=6))
def test_all_changes_are_found_despite_missed_answers(
    answers: list[tuple[_PodsByDevice, bool, bool]],
) -> None:
    known = HolderSources()
    held: _PodsByDevice = {}
    latest: _PodsByDevice = {}
    for mapping, says_what_changed, is_missed in answers:
        changed = ChangedTenants(latest, differing(latest, mapping))
        latest = mapping
        if not is_missed:
            replaced = known.replace(
                answer_with(mapping, changed if says_what_changed else None), MAX_AGE
            )
            assert found(replaced) == differing(held, mapping)
            held = mapping


def test_only_changed_devices_are_compared() -> None:
    known = HolderSources()
    first = {DeviceKey((f"GPU-{number}", "")): ("ns/x",) for number in range(100)}
    gone = DeviceKey(("GPU-7", ""))
    then = {key: pods for key, pods in first.items() if key != gone}
    known.replace(answer_with(first), MAX_AGE)

    replaced = known.replace(answer_with(then, ChangedTenants(first, [gone])), MAX_AGE)

    assert replaced is not None
    assert list(replaced.devices) == [gone]
