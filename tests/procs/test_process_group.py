"""The process group of workers: up between real processes, and listening where it was told to and nowhere else."""

import ipaddress
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection

import psutil
import pytest

from moe.interface import LOOPBACK, interface_of
from service.run.process_group import meeting_addresses
from tests.listening import Address, listening_addresses
from tests.parity.gloo_ranks import many_with_torch
from tests.processes import DEADLINE_S

RANKS = 2


def meet(rank: int, addresses: list[str], pipe: Connection) -> None:
    """One rank: joins the others, sums its number and theirs, and tells where it listens."""
    import torch
    import torch.distributed as dist

    from service.run.process_group import join, open_store

    if rank == 0:
        pipe.send(open_store(addresses[0], DEADLINE_S))
    join(rank, addresses, pipe.recv(), DEADLINE_S)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total, group=dist.new_group(list(range(RANKS)), backend="gloo"))
    pipe.send((total.item(), listening_addresses([psutil.Process()])))
    pipe.recv()  # until all have told
    dist.destroy_process_group()


def outward() -> str:
    """An address of this machine that others may reach."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not ipaddress.ip_address(entry.address).is_loopback:
                return str(entry.address)
    pytest.skip("this machine has loopback alone")


@pytest.mark.sample(1)
@pytest.mark.parametrize("address", [lambda: LOOPBACK, outward], ids=["loopback", "outward"])
def test_it_listens_on_the_address_that_it_is_given_alone(address: Callable[[], str]) -> None:
    addresses = [address()] * RANKS
    context = many_with_torch()
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=meet, args=(rank, addresses, theirs), daemon=True))
        pipes.append(ours)
        processes[-1].start()
    try:
        assert pipes[0].poll(DEADLINE_S)
        port = pipes[0].recv()
        for pipe in pipes:
            pipe.send(port)
        found: list[tuple[float, list[Address]]] = []
        for pipe in pipes:
            assert pipe.poll(DEADLINE_S)
            found.append(pipe.recv())
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(DEADLINE_S)
    finally:
        for process in processes:
            process.kill()
    assert [total for total, _ in found] == [3.0, 3.0]
    for _, listening in found:
        assert set(map(str, listening)) == {addresses[0]}


def test_workers_of_one_machine_meet_on_loopback_and_others_where_the_cluster_has_them() -> None:
    assert meeting_addresses(["10.0.0.7"] * 3) == [LOOPBACK] * 3
    assert meeting_addresses(["127.0.0.1", "127.0.0.3"]) == [LOOPBACK] * 2
    assert meeting_addresses(["10.0.0.7", "10.0.0.8", "10.0.0.7"]) == ["10.0.0.7", "10.0.0.8", "10.0.0.7"]
    assert meeting_addresses(["fd00::7", "fd00::8"]) == ["fd00::7", "fd00::8"]


def test_an_address_belongs_to_an_interface_all_of_loopback_to_its_own_and_a_strangers_to_none() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.9")
    assert interface_of(outward()) not in (None, interface_of(LOOPBACK))
    assert interface_of("192.0.2.1") is None  # set aside for documentation
