import fcntl
import json
import os
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from worker_device.leases import (
    MAX_LEASES,
    Assignment,
    Holder,
    Lease,
    LeaseFile,
    assign,
    holder_of,
    is_alive,
    is_related,
    parse_leases,
    render_leases,
)
from worker_device.visible import Device, Load


def devices(count: int, loads: list[float] | None = None) -> list[Device]:
    return [
        Device(
            id=f"GPU-{number}",
            index=number,
            selector=f"GPU-{number}",
            load=None
            if loads is None
            else Load(utilization_ratio=loads[number], memory_used_ratio=0.0),
        )
        for number in range(count)
    ]


def process(pid: int, namespace: int = 1) -> Holder:
    return Holder(pid=pid, started=pid * 10, namespace=namespace)


def ask(
    leases: tuple[Lease, ...],
    worker: int,
    holder: Holder,
    among: list[Device],
    *,
    ended: frozenset[Holder] = frozenset(),
    kin: frozenset[Holder] = frozenset(),
) -> Assignment:
    return assign(
        leases,
        worker=worker,
        holder=holder,
        devices=among,
        is_alive=lambda one: one not in ended and one.namespace == 1,
        is_related=lambda one: one in kin,
    )


@given(st.permutations(range(8)), st.integers(1, 8), st.booleans())
def test_workers_spread_evenly_in_any_order(order: list[int], count: int, known: bool) -> None:
    among = devices(count, [0.0] * count if known else None)
    leases: tuple[Lease, ...] = ()
    taken: Counter[str] = Counter()
    for worker in order:
        assigned = ask(leases, worker, process(worker + 2), among)
        leases = assigned.leases
        taken[assigned.device.id] += 1
        assert max(taken.values()) - min(taken[one.id] for one in among) <= 1
        assert assigned.workers == len(leases)


@given(st.integers(0, 10**9), st.integers(1, 16))
def test_the_first_worker_gets_the_device_with_its_number(worker: int, count: int) -> None:
    assert ask((), worker, process(2), devices(count)).device.index == worker % count


def test_workers_in_order_get_devices_in_order() -> None:
    leases: tuple[Lease, ...] = ()
    got = []
    for worker in range(5):
        assigned = ask(leases, worker, process(worker + 2), devices(3))
        leases = assigned.leases
        got.append((assigned.device.index, assigned.sharer_count))

    assert got == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]


def test_less_loaded_devices_come_first_and_noise_is_ignored() -> None:
    among = devices(3, [0.9, 0.31, 0.39])

    assert ask((), 0, process(2), among).device.index == 1
    assert ask((), 2, process(2), among).device.index == 2
    assert ask((), 0, process(2), among).reason == "least loaded"


def test_of_equally_busy_devices_the_one_with_less_memory_in_use_comes_first() -> None:
    among = [
        replace(device, load=Load(utilization_ratio=0.0, memory_used_ratio=used))
        for device, used in zip(devices(3), (0.9, 0.3, 0.6), strict=True)
    ]

    assert ask((), 0, process(2), among).device.index == 1


@pytest.mark.parametrize(
    ("loads", "reason"),
    [([0.0, 0.0], "least loaded"), ([0.0, None], "by worker number"), ([0.0], "by worker number")],
    ids=["loads are known", "one is unknown", "no choice"],
)
def test_loads_are_the_reason_only_if_all_are_known(loads: list[float | None], reason: str) -> None:
    among = [
        replace(device, load=None if load is None else Load(utilization_ratio=load))
        for device, load in zip(devices(len(loads)), loads, strict=True)
    ]

    assert ask((), 0, process(2), among).reason == reason


def test_a_device_with_unknown_load_ranks_between_idle_and_busy() -> None:
    idle, unknown, busy = devices(3, [0.0, 0.0, 1.0])
    unknown = Device(id=unknown.id, index=1, selector=unknown.id)

    order = []
    leases: tuple[Lease, ...] = ()
    for worker in (2, 5, 8):
        assigned = ask(leases, worker, process(worker), [idle, unknown, busy])
        leases = assigned.leases
        order.append(assigned.device.id)

    assert order == [idle.id, unknown.id, busy.id]


def test_a_free_device_comes_before_a_less_loaded_taken_one() -> None:
    among = devices(2, [0.0, 1.0])
    first = ask((), 0, process(2), among)

    second = ask(first.leases, 1, process(3), among)

    assert [first.device.index, second.device.index] == [0, 1]


def test_a_restarted_worker_gets_its_device_back_even_if_it_is_the_busiest() -> None:
    leases: tuple[Lease, ...] = ()
    for worker in range(3):
        leases = ask(leases, worker, process(worker + 2), devices(4)).leases
    crashed = frozenset({process(3)})

    newcomer = ask(leases, 9, process(20), devices(4), ended=crashed)
    again = ask(newcomer.leases, 1, process(21), devices(4, [0, 1, 0, 0]), ended=crashed)

    assert newcomer.device.index == 3
    assert (again.device.index, again.reason) == (1, "its previous device")


def test_a_worker_whose_device_was_taken_gets_a_free_one() -> None:
    leases = ask((), 0, process(2), devices(1)).leases
    crashed = frozenset({process(2)})
    leases = ask(leases, 1, process(3), devices(1), ended=crashed).leases

    again = ask(leases, 0, process(4), devices(2), ended=crashed)

    assert again.device.index == 1


def test_a_second_call_of_a_worker_returns_the_same_device() -> None:
    first = ask((), 0, process(2), devices(2, [0, 0.5]))
    leases = ask(first.leases, 1, process(3), devices(2)).leases

    again = ask(leases, 0, process(2), devices(2, [1, 0]))

    assert (again.device, again.reason) == (devices(2, [1, 0])[0], "keeps its device")
    assert len(again.leases) == 2


def test_a_shell_and_its_worker_count_as_one_worker() -> None:
    shell, worker = process(2), process(3)
    leases = ask((), 0, shell, devices(2)).leases

    requested = ask(leases, 0, worker, devices(2), kin=frozenset({shell}))

    assert requested.device.index == 0
    assert [lease.holder for lease in requested.leases] == [worker]


def test_two_running_workers_with_one_number_are_two_workers() -> None:
    leases = ask((), 0, process(2), devices(2)).leases

    other = ask(leases, 0, process(3), devices(2))

    assert other.device.index == 1
    assert [lease.worker for lease in other.leases] == [0, 0]


def test_after_a_container_restart_each_worker_gets_its_device_back() -> None:
    leases: tuple[Lease, ...] = ()
    for worker, load in ((1, [0.0, 0.0]), (0, [0.0, 0.0])):
        leases = ask(leases, worker, process(worker + 2), devices(2, load)).leases
    before = tuple(
        Lease(worker=one.worker, device=one.device, holder=process(one.holder.pid, namespace=7))
        for one in leases
    )

    again = [ask(before, worker, process(9), devices(2, [1, 0])) for worker in (0, 1)]

    assert [one.device.index for one in again] == [0, 1]
    assert {one.reason for one in again} == {"its previous device"}


@pytest.mark.parametrize("worker", [0, 1])
def test_a_device_leased_in_another_container_is_not_free(worker: int) -> None:
    beside = Lease(worker=0, device="GPU-0", holder=process(2, namespace=7))

    assigned = ask((beside,), worker, process(2), devices(2))

    assert (assigned.device.id, assigned.sharer_count, assigned.workers) == ("GPU-1", 0, 2)
    assert beside in assigned.leases, "the next one keeps off it, too"


def test_containers_with_one_lease_file_spread_their_workers() -> None:
    leases: tuple[Lease, ...] = ()
    taken: Counter[str] = Counter()
    for worker in range(2):
        for namespace in range(1, 4):
            assigned = assign(
                leases,
                worker=worker,
                holder=process(worker + 2, namespace=namespace),
                devices=devices(6),
                is_alive=lambda _: True,
                is_related=lambda _: False,
            )
            leases = assigned.leases
            taken[assigned.device.id] += 1

    assert taken == dict.fromkeys(taken, 1)
    assert len(taken) == 6


def test_repeated_container_restarts_do_not_exceed_the_lease_limit() -> None:
    leases: tuple[Lease, ...] = ()
    for restart in range(MAX_LEASES + 50):
        got = set()
        for worker in range(3):
            assigned = assign(
                leases,
                worker=worker,
                holder=process(worker + 2, namespace=restart),
                devices=devices(4),
                is_alive=lambda _: True,
                is_related=lambda _: False,
            )
            leases = assigned.leases
            got.add(assigned.device.id)
        assert len(got) == 3, "each has a device of its own"

    assert len(leases) <= MAX_LEASES


def test_a_lease_of_this_container_comes_before_one_of_another() -> None:
    here, elsewhere = process(2), process(3, namespace=7)
    leases = (
        Lease(worker=0, device="GPU-1", holder=here),
        Lease(worker=0, device="GPU-2", holder=elsewhere),
    )

    again = ask(leases, 0, process(9), devices(3), ended=frozenset({here}))

    assert again.device.index == 1


def test_a_missing_device_is_not_assigned() -> None:
    leases = ask((), 1, process(2), devices(2)).leases

    again = ask(leases, 1, process(2), devices(1))

    assert again.device.index == 0


def test_the_newest_ended_leases_and_all_running_ones_are_kept() -> None:
    ended = frozenset(process(pid) for pid in range(1_000, 1_600))
    leases: tuple[Lease, ...] = ()
    for worker in range(40):
        leases = ask(leases, worker, process(worker + 2), devices(4)).leases
    for number, holder in enumerate(sorted(ended, key=lambda one: one.pid)):
        leases = ask(leases, 100 + number, holder, devices(4), ended=ended).leases

    assert len(leases) == MAX_LEASES
    assert {lease.worker for lease in leases} >= {*range(40), 699, 600}


def test_more_running_workers_than_leases_fit_leave_none_of_ended_ones() -> None:
    alive = [Lease(worker=n, device="GPU-0", holder=process(n)) for n in range(2, MAX_LEASES + 9)]
    gone = [Lease(worker=n, device="GPU-0", holder=process(n)) for n in range(1000, 1003)]

    assigned = ask(
        (*gone, *alive), 1, process(1), devices(1), ended=frozenset(one.holder for one in gone)
    )

    assert assigned.leases[:-1] == tuple(alive)


class Workers(RuleBasedStateMachine):
    """Workers that start, crash and restart in any order, with random device loads."""

    def __init__(self) -> None:
        super().__init__()
        self.leases: tuple[Lease, ...] = ()
        self.alive: dict[int, tuple[Holder, str]] = {}
        self.before: dict[int, str] = {}
        self.count = 3
        self.pids = iter(range(10, 10_000))

    @rule(worker=st.integers(0, 7), loads=st.lists(st.floats(0, 1), min_size=3, max_size=3))
    def start(self, worker: int, loads: list[float]) -> None:
        if worker in self.alive:
            return
        holder = process(next(self.pids))
        taken = Counter(device for _, device in self.alive.values())
        living = frozenset(one for one, _ in self.alive.values())
        assigned = assign(
            self.leases,
            worker=worker,
            holder=holder,
            devices=devices(self.count, loads),
            is_alive=living.__contains__,
            is_related=lambda _: False,
        )
        self.leases = parse_leases(render_leases(assigned.leases))
        got = assigned.device.id
        least = min(taken[one.id] for one in devices(self.count))
        assert taken[got] == least
        before = self.before.get(worker)
        if before is not None and taken[before] == least:
            assert got == before
        assert (assigned.sharer_count, assigned.workers) == (least, len(self.alive) + 1)
        self.alive[worker] = (holder, got)
        self.before[worker] = got

    @rule(worker=st.integers(0, 7))
    def crash(self, worker: int) -> None:
        self.alive.pop(worker, None)

    @invariant()
    def the_living_are_remembered(self) -> None:
        known = {(lease.worker, lease.holder, lease.device) for lease in self.leases}
        for worker, (holder, device) in self.alive.items():
            assert (worker, holder, device) in known


test_workers_that_come_and_go_share_only_when_they_must = Workers.TestCase


@given(
    st.lists(
        st.builds(
            Lease,
            worker=st.integers(0, 2**63 - 1),
            device=st.text(),
            holder=st.builds(
                Holder, pid=st.integers(), started=st.integers(), namespace=st.integers()
            ),
        )
    )
)
def test_leases_round_trip_through_the_file(leases: list[Lease]) -> None:
    assert parse_leases(render_leases(leases)) == tuple(leases)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff",
        b"[]",
        b'{"version": 2, "leases": []}',
        b'{"version": 1, "leases": 5}',
        b'{"version": 1, "leases": [{}, 1, {"worker": "0", "device": "a", "holder": {}}]}',
        b'{"version": 1, "leases": [{"worker": true, "device": "a", "holder": {"pid": 1}}]}',
        b"[" * 100_000,
        render_leases([Lease(worker=0, device="a", holder=process(2))])[:-9],
    ],
)
def test_a_truncated_or_foreign_file_contains_no_leases(content: bytes) -> None:
    assert parse_leases(content) == ()


def test_the_file_is_writable_for_all_users_and_is_truncated(tmp_path: Path) -> None:
    file = LeaseFile(tmp_path / "devices.json")
    many = [Lease(worker=n, device="GPU-1", holder=process(n)) for n in range(9)]
    with file.locked() as held:
        assert held.read() == ()
        held.write(many)
        held.write(many[:1])

    with file.locked() as held:
        assert held.read() == tuple(many[:1])
    assert stat.S_IMODE((tmp_path / "devices.json").stat().st_mode) == 0o666
    assert json.loads((tmp_path / "devices.json").read_bytes())["version"] == 1


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep")
    (tmp_path / "devices.json").symlink_to(target)

    with (
        pytest.raises(OSError, match="symbolic links"),
        LeaseFile(tmp_path / "devices.json").locked(),
    ):
        pass

    assert target.read_text() == "keep"


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[int]:
    """Lock the lease file by another descriptor, which ends the lock when it is closed."""
    descriptor = os.open(tmp_path / "devices.json", os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


def test_a_worker_waits_until_the_file_is_unlocked(
    locked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            fcntl.flock(locked, fcntl.LOCK_UN)

    monkeypatch.setattr("worker_device.leases.time.sleep", pause)

    with LeaseFile(tmp_path / "devices.json").locked() as held:
        assert held.read() == ()

    assert len(pauses) == 3


@pytest.mark.usefixtures("locked")
def test_a_file_that_stays_locked_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_device.leases._LOCK_DEADLINE_SECONDS", 0.0)

    with (
        pytest.raises(TimeoutError, match="another process has locked"),
        LeaseFile(tmp_path / "devices.json").locked(),
    ):
        pass


def test_a_process_that_has_ended_has_no_start_time() -> None:
    assert holder_of(1 << 30) == Holder(
        pid=1 << 30, started=0, namespace=holder_of(os.getpid()).namespace
    )


def test_ancestors_and_descendants_are_related_and_siblings_are_not() -> None:
    own = holder_of(os.getpid())
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as first,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as second,
    ):
        one, other = holder_of(first.pid), holder_of(second.pid)
        related = [
            is_related(own, one),
            is_related(one, own),
            is_related(own, own),
            is_related(one, other),
        ]
        living = is_alive(one, namespace=own.namespace)
        first.kill()
        first.wait()
        second.kill()

    assert related == [True, True, True, False]
    assert living
    assert not is_alive(one, namespace=own.namespace)
    later = Holder(pid=own.pid, started=own.started + 1, namespace=own.namespace)
    elsewhere = Holder(pid=own.pid, started=own.started, namespace=own.namespace + 1)
    assert not any(is_alive(other, namespace=own.namespace) for other in (later, elsewhere))
