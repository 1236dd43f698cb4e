"""The process group of workers, between real processes: it comes up, and listens on its own address alone. Also for
ranks whose default group has no backend for the CPU, as with NCCL; gloo for GPUs alone stands in for it."""

import ipaddress
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from moe.interface import LOOPBACK, interface_of
from service.run.process_group import meeting_addresses
from tests.listening import listening_addresses
from tests.parity.gloo_ranks import rank_processes, receive
from tests.processes import DEADLINE_S

RANKS = 2


def meet(rank: int, addresses: list[str], pipe: Connection) -> None:
    """One rank: join the others, sum the numbers of all, and send the sum and the addresses listened on."""
    import torch
    import torch.distributed as dist

    from service.run.process_group import join, open_store

    if rank == 0:
        pipe.send(open_store(addresses[0], DEADLINE_S))
    join(rank, addresses, pipe.recv(), DEADLINE_S)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total, group=dist.new_group(list(range(RANKS)), backend="gloo"))
    pipe.send((total.item(), listening_addresses([psutil.Process()])))
    pipe.recv()  # until all have sent
    dist.destroy_process_group()


def outward() -> str:
    """An address of this machine that others may reach."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not ipaddress.ip_address(entry.address).is_loopback:
                return str(entry.address)
    pytest.skip("this machine has loopback alone")


@pytest.mark.slow
@pytest.mark.parametrize("address", [lambda: LOOPBACK, outward], ids=["loopback", "outward"])
def test_it_listens_on_the_address_that_it_is_given_alone(address: Callable[[], str]) -> None:
    addresses = [address()] * RANKS
    with rank_processes(meet, RANKS, addresses) as pipes:
        port = receive(pipes[0])
        for pipe in pipes:
            pipe.send(port)
        answers = [receive(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(None)
    assert [total for total, _ in answers] == [3.0, 3.0]
    for _, endpoints in answers:
        assert set(map(str, endpoints)) == {addresses[0]}


def test_workers_of_one_machine_meet_on_loopback_and_others_where_the_cluster_has_them() -> None:
    assert meeting_addresses(["10.0.0.7"] * 3) == [LOOPBACK] * 3
    assert meeting_addresses(["127.0.0.1", "127.0.0.3"]) == [LOOPBACK] * 2
    assert meeting_addresses(["10.0.0.7", "10.0.0.8", "10.0.0.7"]) == ["10.0.0.7", "10.0.0.8", "10.0.0.7"]
    assert meeting_addresses(["fd00::7", "fd00::8"]) == ["fd00::7", "fd00::8"]


def test_an_address_belongs_to_an_interface_all_of_loopback_to_its_own_and_a_strangers_to_none() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.9")
    assert interface_of(outward()) not in (None, interface_of(LOOPBACK))
    assert interface_of("192.0.2.1") is None  # set aside for documentation


def exchange(rank: int, rendezvous: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from moe.parallel import json_collectives
    from moe.sharding.applied.agreement import agree, can_agree
    from moe.sharding.exchange.mesh import ShardingMesh

    dist.init_process_group("cuda:gloo", f"file://{rendezvous}", rank=rank, world_size=RANKS)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.zeros(()))
    results = [
        json_collectives.broadcast_from_rank0(lambda: "first"),
        json_collectives.all_gather_json(rank),
        json_collectives.gather_json(rank),
        json_collectives.scatter_json(["a", "b"] if rank == 0 else None),
        json_collectives.all_reduce_sum(1.0),
    ]
    mesh = ShardingMesh((RANKS,), (rank,), (None,))
    assert can_agree(mesh)
    agree(mesh, 5)
    with pytest.raises(ValueError):
        agree(mesh, 5 + rank)
    pipe.send(results)
    dist.destroy_process_group()


@pytest.mark.slow
def test_values_are_exchanged_without_a_backend_for_the_cpu(tmp_path: Path):
    with rank_processes(exchange, RANKS, str(tmp_path / "rendezvous")) as pipes:
        assert [receive(pipe) for pipe in pipes] == [
            ["first", [0, 1], [0, 1] if rank == 0 else None, "ab"[rank], [2.0]] for rank in range(RANKS)
        ]
