"""Test the known pods and their indexes."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from extender.core.nodes.inventory import PodPhase, PodRecord
from extender.fleet.pods import KnownPods

NAMESPACES = ("blue", "green", "red")

changes = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(["", "node"]),
        st.sampled_from([PodPhase.PENDING, PodPhase.SUCCEEDED]),
        st.booleans(),
    )
)


def pod(number: int, node: str = "", phase: PodPhase = PodPhase.PENDING) -> PodRecord:
    namespace = NAMESPACES[number % 3]
    return PodRecord(
        uid=f"uid-{number}", namespace=namespace, name=f"p{number}", node=node, phase=phase
    )


@given(changes)
def test_indexes_equal_a_scan_of_all_pods(each: list[tuple[int, str, PodPhase, bool]]) -> None:
    pods = KnownPods()
    known: dict[str, PodRecord] = {}
    for at, (number, node, phase, is_gone) in enumerate(each):
        # No API server moves a pod to another namespace, but a watch event may contain it.
        record = replace(pod(number, node, phase), namespace=NAMESPACES[at % 3])
        if is_gone:
            assert pods.pop(record.uid) == known.pop(record.uid, None)
        else:
            pods.put(record)
            known[record.uid] = record

        assert pods.by_uid == known
        assert pods.namespaces.names == {it.namespace for it in known.values()}
        assert pods.unbound == {
            uid: it for uid, it in known.items() if not (it.node or it.phase.is_terminal)
        }


def test_the_namespaces_are_the_same_object_until_one_comes_or_goes() -> None:
    pods = KnownPods()
    pods.put(pod(0))
    first = pods.namespaces.names
    pods.put(pod(0, "node"))
    pods.put(pod(3))
    pods.pop("uid-0")
    assert pods.namespaces.names is first

    pods.pop("uid-3")

    assert pods.namespaces.names == frozenset()
    assert first == {"blue"}


def test_changes_of_waiting_pods_and_of_holders_are_counted_apart() -> None:
    pods = KnownPods()
    counts = []
    for record in (pod(0), pod(0, "node"), pod(0, "node", PodPhase.SUCCEEDED), pod(1)):
        pods.put(record)
        counts.append((pods.changes.waiting, pods.changes.holding))
    pods.pop("uid-1")
    counts.append((pods.changes.waiting, pods.changes.holding))

    assert counts == [(1, 0), (2, 1), (2, 2), (3, 2), (4, 2)]
