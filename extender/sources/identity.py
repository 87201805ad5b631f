"""Which node a series belongs to: its labels matched against the nodes that really exist."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_EMPTY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """By what names the cluster's nodes may be known to Prometheus.

    Attributes:
        names: names of the nodes.
        addresses: node by InternalIP, and by the IP of a pod that runs on it (the exporter's).
        exporter_pods: node by the name of an exporter's pod: an exporter that is not told its
            node's name reports its own host name, which is the pod's.
    """

    names: frozenset[str] = frozenset()
    addresses: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    exporter_pods: Mapping[str, str] = field(default_factory=lambda: _EMPTY)


def host_part(value: str) -> str:
    """Take the port off `host:port`; IPv6 addresses lose their brackets.

    Example:
        >>> host_part("10.0.0.7:9400"), host_part("[fd00::7]:9400"), host_part("fd00::7")
        ('10.0.0.7', 'fd00::7', 'fd00::7')
    """
    if value.startswith("["):
        return value[1:].partition("]")[0]
    host, colon, port = value.rpartition(":")
    return host if colon and port.isdigit() and ":" not in host else value


def match_node(identity: NodeIdentity, values: Iterable[str]) -> str | None:
    """Find the node that the first telling value names.

    A value counts only if it is the name of a node, or the address or exporter pod of one: so
    `localhost`, a pod's name as host name, and nodes that are long gone, name nothing.

    Args:
        identity: the nodes.
        values: values of the labels that may name the node, the most trusted first.

    Example:
        >>> nodes = NodeIdentity(names=frozenset({"a"}), addresses={"10.0.0.7": "a"})
        >>> match_node(nodes, ["localhost", "10.0.0.7:9400"])
        'a'
        >>> match_node(nodes, ["gone"]) is None
        True
    """
    for value in values:
        if not value:
            continue
        host = host_part(value)
        for name in (value, host):
            if name in identity.names:
                return name
        node = identity.addresses.get(host) or identity.exporter_pods.get(host)
        if node in identity.names:
            return node
    return None
