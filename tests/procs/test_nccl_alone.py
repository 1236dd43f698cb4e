"""Ranks whose default process group has no backend for the CPU, as after `init_process_group("nccl")`: plain values are
exchanged, and calls of applied modules are agreed on, all the same. Stood in for by gloo for GPUs alone, which needs
none."""

from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.parity.gloo_ranks import many_with_torch
from tests.processes import DEADLINE_S

RANKS = 2


def exchange(rank: int, rendezvous: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from moe.parallel import plain_collectives
    from moe.sharding.applied.agreement import agree, can_agree
    from moe.sharding.exchange.mesh import ShardingMesh

    dist.init_process_group("cuda:gloo", f"file://{rendezvous}", rank=rank, world_size=RANKS)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.zeros(()))
    found = [
        plain_collectives.broadcast_from_rank0(lambda: "first"),
        plain_collectives.all_gather_json(rank),
        plain_collectives.gather_json(rank),
        plain_collectives.scatter_json(["a", "b"] if rank == 0 else None),
        plain_collectives.all_reduce_sum(1.0),
    ]
    mesh = ShardingMesh((RANKS,), (rank,), (None,))
    assert can_agree(mesh)
    agree(mesh, 5)
    with pytest.raises(ValueError):
        agree(mesh, 5 + rank)
    pipe.send(found)
    dist.destroy_process_group()


def test_values_are_exchanged_without_a_backend_for_the_cpu(tmp_path: Path):
    context = many_with_torch()
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        arguments = (rank, str(tmp_path / "rendezvous"), theirs)
        processes.append(context.Process(target=exchange, args=arguments, daemon=True))
        pipes.append(ours)
        processes[-1].start()
        theirs.close()
    try:
        assert all(pipe.poll(DEADLINE_S) for pipe in pipes)
        assert [pipe.recv() for pipe in pipes] == [
            ["first", [0, 1], [0, 1] if rank == 0 else None, "ab"[rank], [2.0]] for rank in range(RANKS)
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()
