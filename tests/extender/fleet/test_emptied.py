"""Test that sets that were once full cost no more than empty ones."""

from testkit.world import World


def test_a_query_costs_no_more_after_all_nodes_have_changed_at_once() -> None:
    world = World()
    for number in range(2000):
        world.register_node(f"node-{number}")

    world.fleet.snapshot_of_all()

    # A set keeps its largest size, and iterating over it visits all of that.
    assert all(
        names.__sizeof__() == set().__sizeof__()
        for names in (world.fleet._dirty, world.fleet._late)
    )
