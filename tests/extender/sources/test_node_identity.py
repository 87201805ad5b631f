"""Matching of series with nodes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.sources.prometheus.node_identity import NodeIdentity, addresses_of, match_node

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
        pytest.param(["ip-10-0-31-7"], "ip-10-0-31-7.ec2.internal", id="short-of-a-full-name"),
        pytest.param(["GPU-1"], "gpu-1", id="case"),
        pytest.param(["GPU-1.Corp.Local.:9400"], "gpu-1", id="full-of-a-short-name"),
        pytest.param(["ip-10-0-31-7.other.internal"], None, id="another-domain"),
        pytest.param(["10.0.31.7"], None, id="an-address-is-no-short-name"),
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
    assert match_node(replace(IDENTITY), values) == node


HOSTS = NodeIdentity(
    names=frozenset({"i-0abc", "i-0def", "a", "b"}),
    addresses={
        "ip-10-0-0-1.ec2.internal": "i-0abc",
        "Worker": "i-0abc",
        "ip-10-0-0-2.ec2.internal": "i-0def",
        "node.one.local": "a",
        "node.two.local": "b",
    },
)
"""Nodes whose names differ from their host names."""


@pytest.mark.parametrize(
    ("value", "node"),
    [
        pytest.param("ip-10-0-0-1.ec2.internal", "i-0abc", id="internal-dns"),
        pytest.param("IP-10-0-0-2", "i-0def", id="short-and-loud"),
        pytest.param("worker", "i-0abc", id="host-name"),
        pytest.param("node.one.local", "a", id="full"),
        pytest.param("node", None, id="two-may-be-meant"),
        pytest.param("worker.ec2.internal", None, id="its-full-name-is-another"),
    ],
)
def test_a_node_is_found_by_its_host_names(value: str, node: str | None) -> None:
    assert match_node(replace(HOSTS), [value]) == node


LABELS = st.sampled_from(["a", "b", "c"])
HOST_NAMES = st.lists(LABELS, min_size=1, max_size=3).map(".".join)


@given(
    names=st.sets(HOST_NAMES, min_size=1, max_size=4),
    hosts=st.dictionaries(HOST_NAMES, HOST_NAMES, max_size=4),
    value=HOST_NAMES,
)
def test_an_ambiguous_name_matches_no_node(
    names: set[str], hosts: dict[str, str], value: str
) -> None:
    addresses = {host: node for host, node in hosts.items() if node in names and host not in names}
    identity = NodeIdentity(names=frozenset(names), addresses=addresses)
    called = {node: {node} for node in names}
    for host, node in addresses.items():
        called[node].add(host)

    def is_meant(node: str) -> bool:
        return any(
            value == own or ("." not in value and value == own.partition(".")[0])
            for own in called[node]
        ) or (
            value.partition(".")[0] in called[node] and not any("." in own for own in called[node])
        )

    found = match_node(identity, [value.upper()])

    assert found in {None, *filter(is_meant, names)}
    if sum(map(is_meant, names)) == 1:
        assert found is not None
    exact = [node for node in names if value in called[node]]
    if len(exact) == 1:
        assert match_node(identity, [value]) == exact[0]


def test_an_address_of_several_nodes_matches_none() -> None:
    nodes = {"a": ("10.0.0.1", "gpu", "localhost"), "b": ("10.0.0.2", "gpu")}

    assert addresses_of(nodes) == {"10.0.0.1": "a", "10.0.0.2": "b"}


def test_first_label_that_names_a_node_wins() -> None:
    assert match_node(IDENTITY, ["ip-10-0-31-7.ec2.internal", "gpu-1"]) != "gpu-1"
