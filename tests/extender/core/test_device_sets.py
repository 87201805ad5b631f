"""Pods with several GPUs: sets joined by NVLink, sets on one NUMA node, the kubelet's policy."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.decision.allocation import allocate
from extender.core.decision.decision import Decision
from extender.core.decision.filtering import Code, Rejection
from extender.core.decision.scoring import GPU, UNITS
from extender.core.devices.expected_devices import Expected, ExpectedDevice
from extender.core.devices.topology import (
    _SWITCH,
    _UNKNOWN,
    Alignment,
    Place,
    _DeviceSets,
    alignment_by,
    alignment_on,
    device_sets,
)
from extender.core.policy import Strategy
from extender.core.request.gpu_resources import ContainerDevices, ResourceNames, list_containers
from testkit.builders import Node, busy, decide_on, gpu, node, ranking, rejected, request, score_of
from tests.extender.core.holding import TENANCY

GPU_NAME = "nvidia.com/gpu"
QUADS = (0b1111, 0b1111_0000)
HELD = gpu(used=1)
FREE = gpu()


def eight(
    held: int, *, joined: tuple[int, ...] = (), numa: tuple[int, ...] = (), **how: int
) -> Node:
    """Return a node of eight GPUs; `held` is the mask of those that pods hold."""
    gpus = (HELD if held >> slot & 1 else FREE for slot in range(8))
    padded = [(*sets, *[0] * (8 - len(sets))) for sets in (joined, numa)]
    return node(*gpus, joined=padded[0], numa=padded[1], **how)


def codes(decision: Decision) -> dict[str, int]:
    return rejected(decision)


# --- sets of a node -------------------------------------------------------------------------------


def cube() -> list[Place]:
    """Return the GPUs of a DGX-1: two quads, and a link from each GPU to its twin."""
    peers = [
        [
            str(other)
            for other in range(8)
            if other != at and (other // 4 == at // 4 or other % 4 == at % 4)
        ]
        for at in range(8)
    ]
    return [Place(uuid=str(at), nvlink_peers=tuple(listed)) for at, listed in enumerate(peers)]


def test_quads_and_pairs_of_a_hybrid_cube_mesh_are_found() -> None:
    found = device_sets(cube()).joined

    assert set(found[:2]) == set(QUADS)
    assert {pair.bit_count() for pair in found[2:6]} == {2}
    assert found[6:] == (0, 0)


def test_an_nvswitch_joins_all_gpus_on_it() -> None:
    places = [Place(uuid=str(at), nvlink_peers=(_SWITCH,)) for at in range(8)]

    assert device_sets(places).joined == (255, 0, 0, 0, 0, 0, 0, 0)
    assert device_sets([Place(uuid="alone"), *places[1:]]).joined[:2] == (254, 0)


def test_a_link_that_one_end_alone_reports_counts() -> None:
    pair = [Place(uuid="a", nvlink_peers=("b", "gone", "a")), Place(uuid="b", numa_node=0)]

    assert device_sets(pair) == _DeviceSets(joined=(3, 0), numa=(2, 0))


def test_gpus_of_each_numa_node_form_a_set() -> None:
    places = [Place(uuid=str(at), numa_node=at // 2) for at in range(4)]

    assert device_sets([*places, None]).numa == (0b11, 0b1100, 0, 0, 0)


@pytest.mark.parametrize(
    ("by_labels", "by_agent", "expected"),
    [
        (None, None, Alignment.NONE),
        (None, Alignment.SINGLE, Alignment.SINGLE),
        (Alignment.RESTRICTED, Alignment.SINGLE, Alignment.RESTRICTED),
        (Alignment.NONE, Alignment.SINGLE, Alignment.NONE),
        (Alignment.SINGLE, None, Alignment.SINGLE),
    ],
)
def test_labels_give_the_alignment_before_agents(
    by_labels: Alignment | None, by_agent: Alignment | None, expected: Alignment
) -> None:
    places = [Place(numa_node=0), Place(numa_node=1, alignment=by_agent)]

    row = allocate(
        Expected(resource=GPU_NAME, count=2, alignment=by_labels),
        [ExpectedDevice(row=at, place=place) for at, place in enumerate(places)],
        (),
        TENANCY,
        allocatable=2,
        capacity=2,
    )

    assert row.alignment == expected


def test_nothing_is_known_without_places_or_of_very_wide_nodes() -> None:
    assert device_sets([None, None]) == _UNKNOWN
    many = [Place(uuid=str(at), numa_node=0) for at in range(53)]
    assert device_sets(many) == _UNKNOWN
    assert device_sets(many[1:]).numa[0] == (1 << 52) - 1
    wide = [Place(uuid=str(at), nvlink_peers=(_SWITCH,)) for at in range(20)]
    assert device_sets(wide).joined == ()


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=14), st.integers(0, 127))
def test_largest_joined_set_matches_brute_force_unless_cut(
    links: set[tuple[int, int]], kept: int
) -> None:
    linked = {frozenset(pair) for pair in links if pair[0] != pair[1]}
    places = [
        Place(uuid=str(at), nvlink_peers=tuple(str(other) for one, other in links if one == at))
        for at in range(7)
    ]
    some = [at for at in range(7) if kept >> at & 1]
    largest = max(
        size
        for size in range(len(some) + 1)
        for chosen in combinations(some, size)
        if size != 1 and all(frozenset(pair) in linked for pair in combinations(chosen, 2))
    )

    sets = device_sets(places).joined
    found = max(((each & kept).bit_count() for each in sets), default=0)

    assert (found if found > 1 else 0) <= largest
    if not sets or not sets[-1]:
        assert (found if found > 1 else 0) == largest


# --- the order ------------------------------------------------------------------------------------


def test_nvlink_breaks_ties_before_one_numa_node() -> None:
    nodes = {
        "a-apart": eight(0b0011_0011, joined=QUADS, numa=QUADS),
        "b-numa": eight(0b0000_1111, numa=QUADS),
        "c-joined": eight(0b0000_1111, joined=QUADS),
        "d-unknown": eight(0b0000_1111),
    }

    assert ranking(decide_on(nodes, request(4))) == ["c-joined", "b-numa", "a-apart", "d-unknown"]
    assert ranking(decide_on(nodes, request(1))) == sorted(nodes)


@pytest.mark.parametrize(
    "better",
    [
        pytest.param({"b": eight(0b0001_1111)}, id="one GPU less is left over"),
        pytest.param({"b": eight(0)}, id="spread: more idle GPUs"),
    ],
)
def test_joined_gpus_weigh_less_than_one_gpu_of_fit(better: dict[str, Node]) -> None:
    nodes = {"a": eight(0b0000_1111, joined=QUADS), **better}
    strategy = Strategy.SPREAD if better["b"] == eight(0) else Strategy.AUTO

    assert ranking(decide_on(nodes, request(2, strategy=strategy)))[0] == "b"


def test_joined_gpus_weigh_less_than_certainty_health_and_model() -> None:
    joined = eight(0b0000_1111, joined=QUADS)
    for worse in (
        replace(joined, gpus=(*joined.gpus[:7], busy())),
        replace(joined, gpus=(*joined.gpus[:7], gpu(penalty=0.5))),
        replace(joined, suspicion=0.3),
    ):
        nodes = {"a": worse, "b": eight(0b0000_1111)}
        assert ranking(decide_on(nodes, request(4)))[0] == "b"
    models = ("", "nvidia h100", "nvidia a100")
    nodes = {"a": replace(joined, model_id=2), "b": eight(0b0000_1111, model_id=1)}
    wanted = request(4, preferred_models=("H100",))
    assert ranking(decide_on(nodes, wanted, models=models))[0] == "b"


def test_broken_gpus_and_gpus_that_unknown_pods_hold_leave_a_set() -> None:
    whole = eight(0b0000_1111, joined=QUADS)
    broken = replace(whole, gpus=(*whole.gpus[:7], gpu(is_excluded=True)))
    for changed in (broken, replace(whole, taken=1, held=5)):
        plain = replace(changed, joined=())
        assert score_of(changed, request(4)) == score_of(plain, request(4))
    assert score_of(whole, request(4)) > score_of(replace(whole, joined=()), request(4))


@given(st.integers(0, 255), st.integers(1, 8), st.sampled_from([(), QUADS]))
def test_sets_never_change_a_score_by_one_gpu_of_fit(
    held: int, count: int, sets: tuple[int, ...]
) -> None:
    plain = score_of(eight(held), request(count))
    with_sets = score_of(eight(held, joined=sets, numa=sets), request(count))

    assert 0 <= with_sets - plain < GPU / UNITS
    assert count > 1 or with_sets == plain


# --- the kubelet's policy -------------------------------------------------------------------------

SPLIT = 0b0011_0011
"""Two GPUs of each NUMA node are held."""


def aligned(held: int, alignment: Alignment, numa: tuple[int, ...] = QUADS) -> Node:
    return eight(held, numa=numa, alignment=int(alignment))


def test_single_numa_node_policy_refuses_gpus_on_two_numa_nodes() -> None:
    nodes = {"a": aligned(SPLIT, Alignment.SINGLE), "b": aligned(0b1111, Alignment.SINGLE)}
    decision = decide_on(nodes, request(4))

    assert codes(decision) == {"a": Code.MISALIGNED}
    assert codes(decide_on(nodes, request(2))) == {}
    assert not Rejection.MISALIGNED.is_resolvable


@pytest.mark.parametrize(
    "described",
    [
        pytest.param(aligned(SPLIT, Alignment.NONE), id="other policy"),
        pytest.param(aligned(SPLIT, Alignment.SINGLE, (0b1111,)), id="NUMA node of a GPU unknown"),
        pytest.param(
            replace(aligned(SPLIT, Alignment.SINGLE), is_agreed=False), id="holders unsure"
        ),
        pytest.param(
            replace(aligned(SPLIT, Alignment.SINGLE), held=3), id="a GPU is about to be free"
        ),
    ],
)
def test_no_node_is_refused_on_uncertain_grounds(described: Node) -> None:
    assert codes(decide_on({"node": described}, request(4))) == {}


def test_unallocated_busy_or_unhealthy_gpu_counts_as_free() -> None:
    described = aligned(0b1111, Alignment.SINGLE)
    described = replace(described, gpus=(*described.gpus[:7], busy()))

    assert codes(decide_on({"node": described}, request(4))) == {}


def test_each_container_is_aligned_by_itself_unless_the_scope_is_the_pod() -> None:
    two_by_two = request(4, containers=((GPU_NAME, (ContainerDevices(2),) * 2),))
    by_container, by_pod = Alignment.SINGLE, Alignment.SINGLE | Alignment.BY_POD

    assert codes(decide_on({"node": aligned(SPLIT, by_container)}, two_by_two)) == {}
    refused = {"node": Code.MISALIGNED}
    assert codes(decide_on({"node": aligned(SPLIT, by_pod)}, two_by_two)) == refused


def refuses(held: int, *containers: tuple[int, bool]) -> bool:
    """Return whether a node with `single-numa-node` is refused for containers one by one."""
    listed = tuple(ContainerDevices(*one) for one in containers)
    count = max(sum(one.devices for one in listed if not one.is_passed_on), listed[0].devices)
    requested = request(count, containers=((GPU_NAME, listed),))
    return bool(codes(decide_on({"node": aligned(held, Alignment.SINGLE)}, requested)))


def test_containers_are_admitted_one_after_the_other() -> None:
    three_and_one = 0b0111_0001  # NUMA node 0 has three free GPUs, NUMA node 1 has one

    assert not refuses(three_and_one, (3, False), (1, False))
    assert refuses(three_and_one, (2, False), (2, False))
    # The kubelet takes the first NUMA node with room, even if that leaves none for the next one.
    assert refuses(0b0011_0001, (2, False), (3, False))
    assert not refuses(0b0011_0001, (3, False), (2, False))


def test_devices_of_an_init_container_go_to_the_containers_after_it() -> None:
    one_and_four = 0b0000_0111

    assert not refuses(0b0000_0011, (2, True), (2, False))
    assert not refuses(SPLIT, (2, True), (1, False), (1, False))
    # The init container gets a GPU of NUMA node 0, and the next container has to use it.
    assert refuses(one_and_four, (1, True), (4, False))
    # A sidecar keeps its GPU, so that the next container is free to go to the other NUMA node.
    assert not refuses(one_and_four, (1, False), (4, False))


@given(
    st.integers(0, 255),
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=2, max_size=4),
)
def test_containers_are_refused_as_by_the_kubelets_own_procedure(
    held: int, containers: list[tuple[int, bool]]
) -> None:
    containers.sort(key=lambda one: not one[1])  # init containers are admitted first
    free = [{slot for slot in range(8) if ~held >> slot & 1 and slot // 4 == at} for at in (0, 1)]
    reusable: set[int] = set()
    is_refused = False
    for count, is_passed_on in containers:
        allowed = [at for at in (0, 1) if all(slot // 4 == at for slot in reusable)]
        chosen = [at for at in allowed if len(free[at] | reusable) >= count]
        if not chosen:
            is_refused = True
            break
        again = set(sorted(reusable)[:count])
        fresh = set(sorted(free[chosen[0]])[: count - len(again)])
        free[chosen[0]] -= fresh
        reusable = reusable | fresh if is_passed_on else reusable - again
    together = sum(count for count, is_passed_on in containers if not is_passed_on)
    needed = max(together, *(count for count, _ in containers))
    if (~held & 255).bit_count() >= needed:  # else kube-scheduler would not ask
        assert refuses(held, *containers) == is_refused


def asking(containers: list[tuple[int, bool]]) -> dict[str, object]:
    """Build a pod of containers with GPUs; those that pass devices on are init containers."""
    spec: dict[str, list[object]] = {"initContainers": [], "containers": []}
    for count, is_passed_on in containers:
        container = {"resources": {"limits": {GPU_NAME: str(count)}}}
        spec["initContainers" if is_passed_on else "containers"].append(container)
    return {"spec": spec}


@given(st.integers(0, 255), st.lists(st.integers(1, 4), min_size=2, max_size=8))
def test_init_containers_that_only_use_devices_again_change_nothing(
    held: int, inits: list[int]
) -> None:
    containers = [*((count, True) for count in inits), (1, False), (2, False)]
    ((_, listed),) = list_containers(asking(containers), ResourceNames())

    assert refuses(held, *containers) == refuses(held, *map(tuple, listed))  # type: ignore[arg-type] # pairs


@pytest.mark.parametrize(
    ("containers", "judged"),
    [
        pytest.param([*[(1, True)] * 999, (1, False)], 2, id="init containers"),
        pytest.param([*[(1, True), (2, True)] * 499, (1, False)], 3, id="init containers by turns"),
        pytest.param([(1, False)] * 1000, 16, id="containers"),
        pytest.param([(count, True) for count in range(1, 1000)], 16, id="other counts"),
    ],
)
def test_a_thousand_containers_are_not_judged_one_by_one(
    containers: list[tuple[int, bool]], judged: int
) -> None:
    ((name, listed),) = list_containers(asking(containers), ResourceNames())

    assert (name, len(listed)) == (GPU_NAME, judged)


def test_restricted_policy_refuses_only_pods_that_an_empty_node_could_align() -> None:
    nodes = {"node": aligned(SPLIT, Alignment.RESTRICTED)}
    assert codes(decide_on(nodes, request(4))) == {"node": Code.MISALIGNED}
    nodes = {"node": aligned(0b0001, Alignment.RESTRICTED)}
    assert codes(decide_on(nodes, request(5))) == {}
    nodes = {"node": aligned(0, Alignment.SINGLE)}
    assert codes(decide_on(nodes, request(5))) == {"node": Code.MISALIGNED}


@given(st.integers(0, 255), st.integers(1, 8), st.sampled_from([*Alignment]))
def test_a_refused_node_has_no_set_of_free_gpus_on_one_numa_node(
    held: int, count: int, alignment: Alignment
) -> None:
    free = ~held & 255
    room = max((free & quad).bit_count() for quad in QUADS)
    code = codes(decide_on({"node": aligned(held, alignment)}, request(count))).get("node")

    if code == Code.MISALIGNED:
        assert room < count
    if alignment & Alignment.SINGLE and room < count <= free.bit_count():
        assert code == Code.MISALIGNED


def test_policy_and_scope_are_read_by_the_kubelets_words() -> None:
    assert alignment_by("single-numa-node", "pod") == Alignment.SINGLE | Alignment.BY_POD
    assert alignment_by("restricted", "container") == Alignment.RESTRICTED
    for policy in ("none", "best-effort", "another"):
        assert alignment_by(policy, "pod") == Alignment.NONE
    assert alignment_on({}) is None
    assert alignment_on({"idlegpu.io/topology-policy": "none"}) == Alignment.NONE
