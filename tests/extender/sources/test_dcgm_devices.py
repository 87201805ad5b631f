"""The worker's table of devices: shared objects between answers, and memory of parsing."""

import tracemalloc

import orjson

from extender.sources.prometheus.dcgm_devices import DeviceTable
from extender.sources.prometheus.node_identity import NodeIdentity
from extender.sources.prometheus.responses import Rows

NODES, CARDS = 500, 8
NODE_LABELS = ("Hostname",)


def answer() -> Rows:
    """Return all cards of all nodes, parsed from a new text."""
    rows = [
        {
            "metric": {
                "UUID": f"GPU-{node:08x}-0000-0000-0000-{card:012x}",
                "Hostname": f"node-{node}",
                "gpu": str(card),
                "modelName": "NVIDIA H100 80GB HBM3",
            },
            "value": [1_700_000_000.0, str(1_699_999_990 + card)],
        }
        for node in range(NODES)
        for card in range(CARDS)
    ]
    return Rows(orjson.dumps(rows))


def nodes(*, without: int | None = None) -> NodeIdentity:
    return NodeIdentity(names=frozenset(f"node-{it}" for it in range(NODES) if it != without))


def test_removing_a_node_keeps_the_devices_of_others() -> None:
    table = DeviceTable()
    table.read_devices(answer(), nodes(), NODE_LABELS)
    before = {id(row): row.node for row in table._rows.values()}

    changes = table.read_devices(answer(), nodes(without=3), NODE_LABELS)

    assert list(changes.removed) == [3 * CARDS + card for card in range(CARDS)]
    assert not changes.added
    after = {id(row): row.node for row in table._rows.values()}
    assert after == {at: node for at, node in before.items() if node != "node-3"}
    assert len(changes.scraped) == (NODES - 1) * CARDS


def test_an_invalid_index_costs_neither_its_device_nor_others() -> None:
    labels = {"UUID": "GPU-1", "Hostname": "node-1"}
    sample = [1_700_000_000.0, "1699999990"]
    indexes = ("9" * 5000, "\u00b2", "7")
    rows = [
        {"metric": labels | {"UUID": f"GPU-{at}", "gpu": index}, "value": sample}
        for at, index in enumerate(indexes)
    ]
    table = DeviceTable()

    table.read_devices(Rows(orjson.dumps(rows)), nodes(), NODE_LABELS)

    assert [row.card_index for row in table._rows.values()] == [None, None, 7]


def test_reading_an_answer_again_needs_little_memory() -> None:
    table, again = DeviceTable(), answer()
    table.read_devices(answer(), nodes(), NODE_LABELS)
    rows = len(again)  # the first fields of each row are cached now

    tracemalloc.start()
    try:
        table.read_devices(again, nodes(without=3), NODE_LABELS)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    # New objects among the parsed ones would keep the memory of the whole answer alive.
    assert peak_bytes / rows < 400
