"""Predicted seconds of collectives against what each link carries, message by message and step by step."""

import itertools

import pytest

from moe.plan import Cluster, Link
from moe.plan.cost.collectives import Network, Ranks
from tests.unit.test_planner import h100s


def slow_all_to_all(num_bytes: float, count: int, stride: int, per_node: int, within: float, across: float) -> float:
    """What rank 0 sends over each kind of link, message by message; the slower kind decides."""
    inside = outside = 0.0
    for other in range(1, count):
        if other * stride < per_node:
            inside += num_bytes / count
        else:
            outside += num_bytes / count
    return max(inside / within, outside / across)


@pytest.mark.parametrize("stride", [1, 2, 8])
@pytest.mark.parametrize("count", [2, 4, 8, 16, 64])
def test_an_exchange_takes_what_its_slowest_kind_of_link_takes(count: int, stride: int) -> None:
    links = (Link(devices=8, bytes_per_s=400e9, latency_s=0.0), Link(devices=1024, bytes_per_s=50e9, latency_s=0.0))
    network = Network(Cluster(num_nodes=128, devices_per_node=8, device="cpu", links=links))
    expected = slow_all_to_all(1e9, count, stride, 8, 400e9, 50e9)
    assert network.all_to_all(1e9, Ranks(count, stride)) == pytest.approx(expected)


def test_ranks_of_a_group_in_one_node_share_its_ways_out() -> None:
    links = (Link(devices=8, bytes_per_s=400e9, latency_s=0.0), Link(devices=64, bytes_per_s=50e9, latency_s=0.0))
    network = Network(Cluster(num_nodes=8, devices_per_node=8, device="cpu", links=links))
    one_a_node, all_of_them = network.gather(8e9, Ranks(8, 8)), network.gather(8e9, Ranks(64, 1))
    assert one_a_node == pytest.approx(8e9 * 7 / 8 / 50e9)
    assert all_of_them == pytest.approx(max(8e9 * 7 / 8 / 400e9, 8e9 * 7 / 8 / (8 * 50e9)))
    assert network.all_reduce(8e9, Ranks(64, 1)) == pytest.approx(2 * all_of_them)


@pytest.mark.parametrize(("per_node", "count"), [(8, 12), (6, 24), (6, 4), (8, 24)])
def test_a_ring_leaves_nodes_that_it_does_not_fill(per_node: int, count: int) -> None:
    links = (
        Link(devices=per_node, bytes_per_s=1e12, latency_s=0.0),
        Link(devices=4 * per_node, bytes_per_s=1.0, latency_s=1.0),
    )
    network = Network(Cluster(num_nodes=4, devices_per_node=per_node, device="cpu", links=links))
    nodes = -(-count // per_node)
    fewest = min(per_node, count - (nodes - 1) * per_node)
    moved = (nodes - 1) / nodes / fewest if nodes > 1 else 0.0
    assert network.gather(1.0, Ranks(count)) == pytest.approx(nodes - 1 + moved)


@pytest.mark.parametrize("stride", [1, 4, 8])
@pytest.mark.parametrize("count", [2, 8, 32])
def test_the_steps_of_a_ring_wait_for_each_link_that_they_pass(count: int, stride: int) -> None:
    links = (Link(devices=8, bytes_per_s=1e9, latency_s=1.0), Link(devices=256, bytes_per_s=1e9, latency_s=100.0))
    network = Network(Cluster(num_nodes=32, devices_per_node=8, device="cpu", links=links))
    nodes = [rank * stride // 8 for rank in range(count)]
    slow = sum(1.0 if here == there else 100.0 for here, there in itertools.pairwise(nodes))
    assert network.gather(0.0, Ranks(count, stride)) == pytest.approx(slow)
    up_a_tree = 1.0 * (min(count, 8 // stride) - 1).bit_length()
    up_a_tree += 100.0 * (max(1, count * stride // 8) - 1).bit_length()
    assert network.all_reduce(0.0, Ranks(count, stride)) == pytest.approx(2 * min(slow, up_a_tree))


def test_an_exchange_on_a_torus_grows_with_the_root_of_its_devices() -> None:
    seconds = []
    for side in (8, 16, 32):
        cluster = Cluster(num_nodes=side * side // 8, devices_per_node=8, device="tpu-v3", torus=(side, side))
        seconds.append(Network(cluster).all_to_all(1e8, Ranks(side * side)))
    assert seconds[1] / seconds[0] == pytest.approx(2)
    assert seconds[2] / seconds[1] == pytest.approx(2)


def test_hierarchical_dispatch_crosses_to_a_node_once() -> None:
    network = Network(h100s(8))
    plain = network.all_to_all(1e9, Ranks(64))
    assert network.all_to_all(1e9, Ranks(64), 4.0) < plain
    rails = Cluster(num_nodes=8, devices_per_node=8, device="cpu", rails=True)
    assert Network(rails).all_to_all(1e9, Ranks(64)) > plain
