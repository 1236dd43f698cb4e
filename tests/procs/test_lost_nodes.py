"""Lost nodes are named with their ranks, from the connections that closed."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.run.heartbeat import Beat, Introduction
from service.run.heartbeat_server import HeartbeatServer
from service.run.lost_nodes import MAX_NODES, LossExplainer, describe_loss, describe_ranks
from tests.processes import DEADLINE_S, await_that


@pytest.fixture
def server() -> Iterator[HeartbeatServer]:
    server = HeartbeatServer("127.0.0.1")
    yield server
    server.close()


def process(rank: int, node: int, group: int = 0) -> Introduction:
    """A rank's process on a pod of its node."""
    return Introduction(
        secret="", rank=rank, pid=100 + rank, created_at=float(group), node=f"id-{node}", address=f"10.0.0.{node}",
        host=f"worker-{node}",
    )  # fmt: skip


def connect(server: HeartbeatServer, introduction: Introduction) -> socket.socket:
    """Connection of a process that has sent one heartbeat."""
    introduction = introduction.model_copy(update={"secret": server.address.secret})
    connection = socket.create_connection((server.address.host, server.address.port), DEADLINE_S)
    connection.sendall(f"{introduction.model_dump_json()}\n{Beat().model_dump_json()}\n".encode())
    assert connection.recv(100) == b'{"stacks": false}\n'
    return connection


def test_a_node_whose_ranks_have_all_closed_is_named(server: HeartbeatServer) -> None:
    """Another group on other nodes follows."""
    probed: list[str] = []

    def lives(node: str) -> bool:
        probed.append(node)
        return node != "id-3"

    explain = LossExplainer(server, lives)
    with ExitStack() as stack:
        for group, nodes in enumerate([(2, 3), (2, 4)]):
            connections = [
                stack.enter_context(connect(server, process(rank, nodes[rank // 4], group))) for rank in range(8)
            ]
            assert explain(frozenset()) == ""
            for connection in connections[4:]:
                connection.close()
            await_that(lambda: [closed.rank for closed in server.closed()] == [4, 5, 6, 7])
            lost = "node 10.0.0.3 (worker-3) was lost; ranks 4-7 ran there"
            assert explain(frozenset()) == (lost if group == 0 else "ranks 4-7 were lost: their processes died")
    assert probed == ["id-3", "id-4"], "nodes with living ranks are not probed"


def test_a_process_that_reconnects_is_not_lost(server: HeartbeatServer) -> None:
    connect(server, process(0, 2)).close()
    await_that(lambda: len(server.closed()) == 1)
    with connect(server, process(0, 2)):
        assert server.closed() == []
        assert LossExplainer(server, lambda _: False)(frozenset()) == ""


def test_a_vanished_node_is_named_by_what_ray_knows(server: HeartbeatServer) -> None:
    """Its connections never close."""
    with connect(server, process(0, 2)), connect(server, process(1, 3)):
        explain = LossExplainer(server, lambda node: node == "id-2")
        assert explain(frozenset({1})) == "node 10.0.0.3 (worker-3) was lost; rank 1 ran there"
        assert explain(frozenset({0})) == "rank 0 was lost: its process died"


def test_many_nodes_are_not_all_named() -> None:
    processes = [process(rank, rank) for rank in range(20)]
    words = describe_loss(processes, set(range(20)), lambda _: False)
    assert words.count("worker-") == MAX_NODES
    assert words.endswith("and 12 more were lost; ranks 0-19 ran there")


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_in_words_are_exactly_the_ranks(ranks: set[int]) -> None:
    word, _, numbers = describe_ranks(list(ranks)).partition(" ")
    assert word == ("rank" if len(ranks) == 1 else "ranks")
    ends = [[int(end) for end in part.split("-")] for part in numbers.split(", ")]
    assert [rank for first, *last in ends for rank in range(first, (last or [first])[0] + 1)] == sorted(ranks)
    assert all(first > before[-1] + 1 for before, (first, *_) in pairwise(ends)), "runs are whole"


@given(
    nodes=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    lost=st.sets(st.integers(0, 11)),
    dead_nodes=st.sets(st.integers(0, 4)),
)
def test_only_a_dead_node_that_has_lost_a_rank_is_lost(nodes: list[int], lost: set[int], dead_nodes: set[int]) -> None:
    processes = [process(rank, node) for rank, node in enumerate(nodes)]
    words = describe_loss(processes, lost, lambda node: int(node.removeprefix("id-")) not in dead_nodes)
    for node in set(nodes):
        ranks = {rank for rank, place in enumerate(nodes) if place == node}
        assert (f"(worker-{node})" in words) == (node in dead_nodes and bool(ranks & lost))
    assert (words == "") == (not lost)
