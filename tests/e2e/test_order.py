"""kube-scheduler's own scores decide among equal nodes, but never between idle and busy ones.

docs/decision.md has the arithmetic; the tests cover both directions for nodes of every usual size.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import pytest

from simulation.devices import Load
from simulation.kubelet import MEMORY_ANNOTATION, UTILIZATION_ANNOTATION
from simulation.models import A100_40GB, GIB, H100
from testkit.controlplane.objects import GPU, Object, pod
from testkit.controlplane.world import MOST_OF_HOST, World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ZONE: Final = "topology.kubernetes.io/zone"
FAVOURED: Final = "test.idlegpu.io/favoured"
APP: Final = {"app": "spread"}
GROUP: Final = "test.idlegpu.io/group"
SIZES: Final = tuple((kind, cards) for kind in ("whole", "shared") for cards in (1, 2, 4, 8, 16))
"""Kinds of GPUs and their number: the nodes of each are candidates for their own pods alone."""
WARM: Final = {"assumed": {"warm_up_seconds": 1}}

SPREAD_ZONES: Final = {
    "maxSkew": 1,
    "topologyKey": ZONE,
    "whenUnsatisfiable": "ScheduleAnyway",
    "labelSelector": {"matchLabels": APP},
}


Size = tuple[str, int]


def name_of(size: Size) -> str:
    kind, cards = size
    return f"{kind}-{cards}"


def only(size: Size) -> dict[str, str]:
    """Return the node selector of a size's nodes."""
    return {GROUP: name_of(size)}


def add_to(world: World, size: Size, name: str, zone: str, *labels: tuple[str, str]) -> str:
    """Add a node to those of a size."""
    kind, cards = size
    add = world.add_shared if kind == "shared" else world.add
    own = ((GROUP, name_of(size)), (ZONE, zone), *labels)
    return add(f"{name_of(size)}-{name}", cards, labels=own)


async def label(world: World, labels: dict[str, dict[str, str]]) -> None:
    """Label nodes, and wait until kube-scheduler's cache has the labels."""
    for node, given in labels.items():
        item = {"kind": "Node", "metadata": {"name": node}}
        await world.client.patch(item, {"metadata": {"labels": given}})
    await world.scheduler_synced(*labels)


async def avoid(world: World, *nodes: str) -> None:
    """Taint nodes with PreferNoSchedule."""
    for node in nodes:
        item = {"kind": "Node", "metadata": {"name": node}}
        taints = [{"key": "test.idlegpu.io/avoid", "effect": "PreferNoSchedule"}]
        await world.client.patch(item, {"spec": {"taints": taints}})
    await world.scheduler_synced(*nodes)


def zones_of(nodes: Iterable[str], zones: dict[str, dict[str, str]]) -> dict[str, int]:
    return dict(Counter(zones[node][ZONE] for node in nodes))


def spreading(name: str, annotations: Mapping[str, str] | None = None, **more: Any) -> Object:
    """Build a pod with a soft topology spread over zones that leaves its GPUs idle.

    So it does not matter whether readings show a pod before the next one is placed.
    """
    quiet = {UTILIZATION_ANNOTATION: "0", MEMORY_ANNOTATION: "1Gi"}
    return pod(
        name,
        labels=APP,
        annotations={**quiet, **(annotations or {})},
        topologySpreadConstraints=[SPREAD_ZONES],
        **more,
    )


def preferring_favoured(name: str, **more: Any) -> Object:
    """Build a pod whose soft constraints all prefer the favoured nodes and their zone."""
    preferred = [
        {
            "weight": 100,
            "preference": {"matchExpressions": [{"key": FAVOURED, "operator": "Exists"}]},
        }
    ]
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    return spreading(name, affinity=affinity, **more)


# --- among equal nodes kube-scheduler's scores decide ---------------------------------------------


@pytest.mark.parametrize("kind", ["whole", "shared"])
async def test_soft_zone_spread_decides_among_equal_nodes(world: World, kind: str) -> None:
    # The nodes of both kinds together are too many pages for Prometheus on a busy machine.
    sizes = [size for size in SIZES if size[0] == kind]
    groups = {
        size: [
            add_to(world, size, f"{zone}-{number}", zone) for zone in "ab" for number in range(3)
        ]
        for size in sizes
    }
    await world.start()

    placed: dict[Size, list[str]] = {size: [] for size in sizes}
    for number in range(4):
        pods = [
            spreading(f"pod-{name_of(size)}-{number}", nodeSelector=only(size)) for size in sizes
        ]
        for size, node in zip(sizes, await world.place_all(pods), strict=True):
            placed[size].append(node)

    for size, nodes in groups.items():
        zones = {node: {ZONE: "a" if at < 3 else "b"} for at, node in enumerate(nodes)}
        assert zones_of(placed[size], zones) == {"a": 2, "b": 2}, size


async def test_preferences_decide_in_a_shortlist_of_equal_nodes(world: World) -> None:
    nodes = [world.add(f"{zone}-{number}", 2) for zone in "ab" for number in range(4)]
    await world.start({"wire": {"shortlist": 2}})
    zones = {node: {ZONE: "a" if at < 4 else "b"} for at, node in enumerate(nodes)}
    await label(world, zones)
    await label(world, {nodes[2]: {FAVOURED: "yes"}})

    placed = [await world.place(spreading(f"pod-{number}")) for number in range(4)]
    drawn = preferring_favoured("drawn")
    del drawn["spec"]["topologySpreadConstraints"]

    assert zones_of(placed, zones) == {"a": 2, "b": 2}
    assert await world.place(drawn) == nodes[2]


async def test_preferred_affinity_and_a_taint_to_avoid_decide_among_equal_nodes(
    world: World,
) -> None:
    first, second, third = (world.add(name, 8) for name in "abc")
    await world.start()
    await label(world, {third: {FAVOURED: "yes"}})
    await avoid(world, first)

    assert await world.place(pod("stock")) in (second, third)
    assert await world.place(preferring_favoured("drawn")) == third


async def test_a_small_difference_in_load_is_less_than_soft_zone_spread(world: World) -> None:
    calm, other = world.add_shared("calm"), world.add_shared("other")
    await world.start(WARM)
    await label(world, {calm: {ZONE: "a"}, other: {ZONE: "b"}})
    await world.tenants(other, 1, utilization=0.1)
    await world.tenants(calm, 1, utilization=0.0)
    await world.covered(calm, other)
    assert await world.place(spreading("first", nodeSelector={ZONE: "a"})) == calm

    assert await world.place(spreading("second")) == other


# --- the extender decides material differences ----------------------------------------------------


async def test_idle_against_busy_never_loses_to_all_wishes_together(world: World) -> None:
    groups = {
        size: (
            add_to(world, size, "z-idle", "a"),
            add_to(world, size, "a-worse", "b", (FAVOURED, "yes")),
        )
        for size in SIZES
    }
    worse = {size: node for size, (_, node) in groups.items()}
    shared = {size: node for size, node in worse.items() if size[0] == "shared"}
    foreign = {size: node for size, node in worse.items() if size[0] == "whole" and size[1] > 1}
    for node in foreign.values():
        world.fleet.set_foreign(node, 0, Load(utilization=0.9, memory_bytes=30 * GIB))
    silent = worse["whole", 1]
    world.fleet.silence(silent)  # a node with foreign use would be refused
    await world.start(WARM)
    for (_, cards), node in shared.items():
        await world.tenants(node, cards, utilization=0.9)
    await world.covered(*shared.values())
    for node in foreign.values():
        await world.wait_state(node, 0, "foreign")
    every = {size: idle for size, (idle, _) in groups.items()}
    beside = {size: idle for size, idle in every.items() if worse[size] != silent}
    before = [
        spreading(f"before-{name_of(size)}", nodeSelector={**only(size), ZONE: "a"})
        for size in beside
    ]
    assert await world.place_all(before) == list(beside.values())
    await avoid(world, *every.values())
    await world.fill_host(*every.values())

    drawn = [
        preferring_favoured(f"drawn-{name_of(size)}", nodeSelector=only(size)) for size in SIZES
    ]
    assert await world.place_all(drawn) == list(every.values())


async def test_a_preferred_model_outweighs_soft_zone_spread(world: World) -> None:
    favoured, other = world.add("z-h100", 8, H100), world.add("a-a100", 8, A100_40GB)
    await world.start()
    await label(world, {favoured: {ZONE: "a"}, other: {ZONE: "b", FAVOURED: "yes"}})
    assert await world.place(spreading("before", nodeSelector={ZONE: "a"})) == favoured

    wants = preferring_favoured("wants")
    wants["metadata"]["annotations"]["idlegpu.io/prefer-models"] = "H100"

    assert await world.place(wants) == favoured


async def test_a_clear_difference_in_fit_outweighs_soft_zone_spread(world: World) -> None:
    nearly_full, empty = world.add("z-full", 8), world.add("a-empty", 8)
    await world.start()
    await world.tenants(nearly_full, 6)
    await label(world, {nearly_full: {ZONE: "a"}, empty: {ZONE: "b"}})
    assert await world.place(spreading("before", nodeSelector={ZONE: "a"})) == nearly_full

    assert await world.place(spreading("last")) == nearly_full


async def test_a_clear_difference_in_load_outweighs_soft_zone_spread(world: World) -> None:
    calm, busy = world.add_shared("z-calm"), world.add_shared("a-busy")
    await world.start(WARM)
    await world.tenants(busy, 2, utilization=0.4)
    await world.tenants(calm, 1, utilization=0.0)
    await world.covered(calm, busy)
    await label(world, {calm: {ZONE: "a"}, busy: {ZONE: "b"}})
    # Both nodes are idle for this pod, so their load decides.
    tolerant = {"idlegpu.io/max-utilization": "100"}
    assert await world.place(spreading("before", nodeSelector={ZONE: "a"})) == calm

    assert await world.place(spreading("second", annotations=tolerant)) == calm


async def test_one_gpu_of_fit_outweighs_least_allocated(world: World) -> None:
    sizes = [(kind, cards) for kind, cards in SIZES if kind == "whole" and cards > 1]
    for size in sizes:
        for name in "ab":
            add_to(world, size, name, "a")
    await world.start()

    def proportional(size: Size, number: int) -> Object:
        _, cards = size
        item = pod(f"pod-{name_of(size)}-{number}", nodeSelector=only(size))
        requests = {"cpu": str(112 // cards), "memory": f"{896 // cards}Gi", GPU: "1"}
        item["spec"]["containers"][0]["resources"]["requests"] = requests
        return item

    placed: dict[Size, set[str]] = {size: set() for size in sizes}
    for number in range(5):
        having_room = [size for size in sizes if number < size[1]]
        pods = [proportional(size, number) for size in having_room]
        for size, node in zip(having_room, await world.place_all(pods), strict=True):
            placed[size].add(node)

    assert {size: len(nodes) for size, nodes in placed.items()} == dict.fromkeys(sizes, 1)


@pytest.mark.parametrize(
    ("burden", "requested"),
    [
        pytest.param(MOST_OF_HOST, {"cpu": "16"}, id="cpu"),
        pytest.param(
            {"ephemeral-storage": "900Gi"}, {"ephemeral-storage": "90Gi"}, id="ephemeral-storage"
        ),
    ],
)
async def test_gpus_that_their_node_cannot_serve_are_no_room(
    world: World, burden: dict[str, str], requested: dict[str, str]
) -> None:
    short, roomy = world.add("z-short", 8), world.add("a-roomy", 4)
    await world.start()
    await world.fill_host(short, requests=burden)  # leaves room for one such pod
    item = pod("hungry")
    item["spec"]["containers"][0]["resources"]["requests"] = {**requested, GPU: "1"}

    assert await world.place(item) == short
    assert await world.place(pod("stock")) == roomy
