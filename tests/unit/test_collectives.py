"""Predicted seconds of collectives against the traffic of each link, message by message and step by step."""

import itertools

import pytest

from moe.plan import Cluster, Link
from moe.plan.cost.collectives import Network, Ranks
from tests.unit.test_planner import h100s


def network(num_nodes: int, inner: tuple[float, float], outer: tuple[float, float], per_node: int = 8) -> Network:
    """Nodes with (bytes/s, latency in s) of links within and between them."""
    links = tuple(
        Link(devices=devices, bytes_per_s=rate, latency_s=latency)
        for devices, (rate, latency) in ((per_node, inner), (num_nodes * per_node, outer))
    )
    return Network(Cluster(num_nodes=num_nodes, devices_per_node=per_node, device="cpu", links=links))


@pytest.mark.parametrize("stride", [1, 2, 8])
@pytest.mark.parametrize("count", [2, 4, 8, 16, 64])
def test_an_all_to_all_takes_as_long_as_the_slower_kind_of_link(count: int, stride: int) -> None:
    num_in_node = sum(peer * stride < 8 for peer in range(1, count))
    expected = 1e9 / count * max(num_in_node / 400e9, (count - 1 - num_in_node) / 50e9)
    seconds = network(128, (400e9, 0.0), (50e9, 0.0)).all_to_all(1e9, Ranks(count, stride))
    assert seconds == pytest.approx(expected)


def test_ranks_of_one_node_share_its_links_to_others() -> None:
    nodes = network(8, (400e9, 0.0), (50e9, 0.0))
    one_a_node, all_ranks = nodes.gather(8e9, Ranks(8, 8)), nodes.gather(8e9, Ranks(64, 1))
    assert one_a_node == pytest.approx(8e9 * 7 / 8 / 50e9)
    assert all_ranks == pytest.approx(max(8e9 * 7 / 8 / 400e9, 8e9 * 7 / 8 / (8 * 50e9)))
    assert nodes.all_reduce(8e9, Ranks(64, 1)) == pytest.approx(2 * all_ranks)


@pytest.mark.parametrize(("per_node", "count"), [(8, 12), (6, 24), (6, 4), (8, 24)])
def test_a_ring_over_partly_filled_nodes(per_node: int, count: int) -> None:
    num_nodes = -(-count // per_node)
    fewest = min(per_node, count - (num_nodes - 1) * per_node)
    transfer_s = (num_nodes - 1) / num_nodes / fewest if num_nodes > 1 else 0.0
    seconds = network(4, (1e12, 0.0), (1.0, 1.0), per_node).gather(1.0, Ranks(count))
    assert seconds == pytest.approx(num_nodes - 1 + transfer_s)


@pytest.mark.parametrize("stride", [1, 4, 8])
@pytest.mark.parametrize("count", [2, 8, 32])
def test_the_steps_of_a_ring_wait_for_each_link_that_they_pass(count: int, stride: int) -> None:
    nodes = [rank * stride // 8 for rank in range(count)]
    ring = sum(1.0 if node == next_node else 100.0 for node, next_node in itertools.pairwise(nodes))
    slow_network = network(32, (1e9, 1.0), (1e9, 100.0))
    assert slow_network.gather(0.0, Ranks(count, stride)) == pytest.approx(ring)
    tree = (min(count, 8 // stride) - 1).bit_length() + 100.0 * (max(1, count * stride // 8) - 1).bit_length()
    assert slow_network.all_reduce(0.0, Ranks(count, stride)) == pytest.approx(2 * min(ring, tree))


def test_an_all_to_all_on_a_torus_grows_with_the_root_of_its_devices() -> None:
    seconds = []
    for side in (8, 16, 32):
        cluster = Cluster(num_nodes=side * side // 8, devices_per_node=8, device="tpu-v3", torus=(side, side))
        seconds.append(Network(cluster).all_to_all(1e8, Ranks(side * side)))
    assert [seconds[1] / seconds[0], seconds[2] / seconds[1]] == pytest.approx([2, 2])


def test_hierarchical_dispatch_crosses_to_a_node_once() -> None:
    flat = Network(h100s(8)).all_to_all(1e9, Ranks(64))
    assert Network(h100s(8)).all_to_all(1e9, Ranks(64), 4.0) < flat
    rails = Cluster(num_nodes=8, devices_per_node=8, device="cpu", rails=True)
    assert Network(rails).all_to_all(1e9, Ranks(64)) > flat
