"""Find the node of a series: match its labels with the nodes of the cluster."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from types import MappingProxyType

_EMPTY: Mapping[str, str] = MappingProxyType({})

_LOCALHOST = "localhost"
"""A host name that every machine has, so that it identifies none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """Names and addresses by which metrics may identify the cluster's nodes.

    Attributes:
        names: names of the nodes.
        addresses: node by its addresses (IPs and host names), and by the IP of an exporter pod that
            runs on it.
        exporter_pods: node by the name, and by the `namespace/name`, of its exporter pod: an
            exporter without its node's name in its environment reports its own host name, which is
            the pod's name.
    """

    names: frozenset[str] = frozenset()
    addresses: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    exporter_pods: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    _hosts: dict[str, str | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def host(self, name: str) -> str | None:
        """Return the node with a host name, ignoring case and the domain.

        A short name matches the full name and vice versa if only one node can be meant. Names with
        different domains are different hosts.
        """
        if not self._hosts:
            self._hosts.update(_by_host(self))
        host_name = name.rstrip(".").lower()
        if host_name in self._hosts:
            return self._hosts[host_name]
        return None if _is_ip(host_name) else self._hosts.get(f"{host_name.partition('.')[0]}.")


def _by_host(identity: NodeIdentity) -> Iterator[tuple[str, str | None]]:
    """Yield nodes by full and short host name, None if several nodes have the name.

    A name with a trailing dot matches in any domain: it belongs to a node without a full name.
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
    """Return nodes by address, without addresses that several nodes have.

    Args:
        nodes: the addresses of each node, by its name.
    """
    found: dict[str, str] = {}
    ambiguous = {_LOCALHOST}
    for node, addresses in nodes.items():
        for address in addresses:
            if found.setdefault(address, node) != node:
                ambiguous.add(address)
    return {address: node for address, node in found.items() if address not in ambiguous}


def _host_part(value: str) -> str:
    """Remove the port of `host:port`, and the brackets of IPv6 addresses.

    Example:
        >>> _host_part("10.0.0.7:9400"), _host_part("[fd00::7]:9400"), _host_part("fd00::7")
        ('10.0.0.7', 'fd00::7', 'fd00::7')
    """
    if value.startswith("["):
        return value[1:].partition("]")[0]
    host, colon, port = value.rpartition(":")
    return host if colon and port.isdigit() and ":" not in host else value


def match_node(identity: NodeIdentity, values: Iterable[str]) -> str | None:
    """Return the node that the first matching value identifies, None if none matches.

    A value matches if it is a node's name, address or exporter pod. Therefore `localhost`, host
    names of other pods and removed nodes match nothing. Case is ignored, and short and full host
    names match each other if only one node can be meant.

    Args:
        values: values of the labels that may name the node, the most reliable one first.

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
        host = _host_part(value)
        for name in (value, host):
            if name in identity.names:
                return name
        node = identity.addresses.get(host) or identity.exporter_pods.get(host)
        if node not in identity.names:
            node = identity.host(host)
        if node is not None:
            return node
    return None
