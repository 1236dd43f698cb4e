"""Reachability under an overlay's network policies, as Kubernetes defines them."""

import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.deploy.deployment import Manifest, Overlay, PodTemplate

ALL_PORTS = "*"
NODE_ADDRESS = "192.0.2.17"  # of the documentation's addresses, as components/host-network names them


@dataclass(frozen=True)
class Endpoint:
    """One side of a connection: a pod by namespace and labels, or an address outside the pod network."""

    namespace: str = "elsewhere"
    labels: dict[str, str] = field(default_factory=dict)
    address: str | None = None


STRANGER = Endpoint()


def endpoint(overlay: Overlay, pod: PodTemplate) -> Endpoint:
    """A pod as policies see it: on its node's network, as the node."""
    if pod.spec.get("hostNetwork"):
        return Endpoint(address=NODE_ADDRESS)
    return Endpoint(overlay.namespace, pod.labels)


def ingress_ports(overlay: Overlay, source: Endpoint, target: PodTemplate) -> set[int | str]:
    """Ports on which `source` may reach `target`."""
    rules = _rules(overlay, target, "ingress")
    if rules is None:
        return {ALL_PORTS}
    return _ports((rule for rule in rules if _admits(overlay, rule.get("from"), source)), target.ports)


def egress_ports(
    overlay: Overlay, source: PodTemplate, target: Endpoint, names: dict[str, int] | None = None
) -> set[int | str]:
    """Ports of `target` that `source` may call; `names` are its named ones."""
    rules = _rules(overlay, source, "egress")
    if rules is None:
        return {ALL_PORTS}
    return _ports((rule for rule in rules if _admits(overlay, rule.get("to"), target)), names or {})


def open_ports(overlay: Overlay, source: PodTemplate, target: PodTemplate) -> set[int | str]:
    """Ports of `target` that `source` may call and on which `target` admits it."""
    outgoing = egress_ports(overlay, source, endpoint(overlay, target), target.ports)
    incoming = ingress_ports(overlay, endpoint(overlay, source), target)
    if ALL_PORTS in outgoing:
        return incoming
    return outgoing if ALL_PORTS in incoming else outgoing & incoming


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a label selector matches these labels."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In", "the only operator that these manifests use"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


def _rules(overlay: Overlay, pod: PodTemplate, direction: str) -> list[Manifest] | None:
    """Rules of all policies that select the pod; None if it is on its node's network, which policies do not guard."""
    if pod.spec.get("hostNetwork"):
        return None
    return list(_selecting(overlay, pod, direction))


def _selecting(overlay: Overlay, pod: PodTemplate, direction: str) -> Iterator[Manifest]:
    for policy in overlay.objects_of("NetworkPolicy"):
        if selects(policy["spec"]["podSelector"], pod.labels):
            yield from policy["spec"].get(direction, [])


def _admits(overlay: Overlay, peers: list[Manifest] | None, other: Endpoint) -> bool:
    return peers is None or any(_matches(overlay, peer, other) for peer in peers)


def _matches(overlay: Overlay, peer: Manifest, other: Endpoint) -> bool:
    if "ipBlock" in peer:
        if other.address is None:
            return False
        address, block = ipaddress.ip_address(other.address), peer["ipBlock"]
        networks = [ipaddress.ip_network(cidr) for cidr in block.get("except", [])]
        return address in ipaddress.ip_network(block["cidr"]) and not any(address in network for network in networks)
    if other.address is not None:
        return False
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": other.namespace}):
            return False
    elif other.namespace != overlay.namespace:
        return False
    return selects(peer.get("podSelector", {}), other.labels)


def _ports(rules: Iterable[Manifest], names: dict[str, int]) -> set[int | str]:
    ports = {port["port"] for rule in rules for port in rule.get("ports", [{"port": ALL_PORTS}])}
    return {ALL_PORTS} if ALL_PORTS in ports else {names.get(port, port) for port in ports}
