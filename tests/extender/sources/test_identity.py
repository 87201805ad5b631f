"""Which node a series belongs to."""

import pytest

from extender.sources.identity import NodeIdentity, match_node

IDENTITY = NodeIdentity(
    names=frozenset({"gpu-1", "ip-10-0-31-7.ec2.internal"}),
    addresses={"10.0.0.1": "gpu-1", "10.244.3.17": "gpu-1", "fd00::7": "gpu-1", "10.9.9.9": "gone"},
    exporter_pods={"dcgm-exporter-7tk2x": "gpu-1"},
)


@pytest.mark.parametrize(
    ("values", "node"),
    [
        pytest.param(["gpu-1"], "gpu-1", id="name"),
        pytest.param(["gpu-1:9400"], "gpu-1", id="instance-relabeled-to-the-name"),
        pytest.param(["ip-10-0-31-7.ec2.internal"], "ip-10-0-31-7.ec2.internal", id="full-name"),
        pytest.param(["ip-10-0-31-7"], None, id="domain-is-part-of-the-name"),
        pytest.param(["10.0.0.1:9400"], "gpu-1", id="address-of-the-node"),
        pytest.param(["10.244.3.17"], "gpu-1", id="address-of-the-exporter-pod"),
        pytest.param(["[fd00::7]:9400"], "gpu-1", id="address-of-six-parts"),
        pytest.param(["dcgm-exporter-7tk2x"], "gpu-1", id="pod-name-as-host-name"),
        pytest.param(["localhost"], None, id="localhost"),
        pytest.param(["localhost", "", "10.0.0.1:9400"], "gpu-1", id="next-label-helps"),
        pytest.param(["ghost"], None, id="node-is-gone"),
        pytest.param(["10.9.9.9"], None, id="address-of-a-node-that-is-gone"),
        pytest.param([], None, id="no-label"),
    ],
)
def test_series_is_matched_to_the_node_that_it_names(values: list[str], node: str | None) -> None:
    assert match_node(IDENTITY, values) == node


def test_first_label_that_names_a_node_wins() -> None:
    assert match_node(IDENTITY, ["ip-10-0-31-7.ec2.internal", "gpu-1"]) != "gpu-1"
