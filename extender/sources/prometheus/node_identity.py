"""Which node a series belongs to: its labels matched against the nodes that really exist."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from types import MappingProxyType

_EMPTY: Mapping[str, str] = MappingProxyType({})

LOCALHOST = "localhost"
"""What machines call themselves: it names none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """By what names the cluster's nodes may be known to Prometheus.

    Attributes:
        names: names of the nodes.
        addresses: node by its addresses (IPs and host names), and by the IP of a pod that runs on
            it (the exporter's).
        exporter_pods: node by the name of an exporter's pod: an exporter that is not told its
            node's name reports its own host name, which is the pod's.
    """

    names: frozenset[str] = frozenset()
    addresses: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    exporter_pods: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    _hosts: dict[str, str | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def host(self, name: str) -> str | None:
        """Return the node that has a host name, whatever its case and however much of it is said.

        A short name stands for the full one, and a full one for the short, where one node alone may
        be meant. Names of two domains are two hosts.
        """
        if not self._hosts:
            self._hosts.update(_by_host(self))
        told = name.rstrip(".").lower()
        if told in self._hosts:
            return self._hosts[told]
        return None if _is_ip(told) else self._hosts.get(f"{told.partition('.')[0]}.")


def _by_host(identity: NodeIdentity) -> Iterator[tuple[str, str | None]]:
    """Yield nodes by full and short host names, None where several have the same.

    A name with a dot at its end stands for itself in any domain: of nodes that have no full name.
    """
    hosts: dict[str, set[str]] = {}
    for host, node in (*((name, name) for name in identity.names), *identity.addresses.items()):
        if node in identity.names and not _is_ip(host):
            hosts.setdefault(node, set()).add(host.rstrip(".").lower())
    found: dict[str, set[str]] = {}
    for node, names in hosts.items():
        for name in names:
            found.setdefault(name, set()).add(node)
            found.setdefault(name.partition(".")[0], set()).add(node)
        for name in names:
            if not any("." in other for other in names):
                found.setdefault(f"{name}.", set()).add(node)
    for name, nodes in found.items():
        yield name, min(nodes) if len(nodes) == 1 else None


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def addresses_of(nodes: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return nodes by address; what several machines call themselves names none of them.

    Args:
        nodes: the addresses of each node, by its name.
    """
    found: dict[str, str] = {}
    several = {LOCALHOST}
    for node, addresses in nodes.items():
        for address in addresses:
            if found.setdefault(address, node) != node:
                several.add(address)
    return {address: node for address, node in found.items() if address not in several}


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
    `localhost`, a pod's name as host name, and nodes that are long gone, name nothing. Case makes
    no difference, nor whether a host name is short or full, where one node alone may be meant.

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
        if node not in identity.names:
            node = identity.host(host)
        if node is not None:
            return node
    return None
