"""Agreement of all ranks, before each call, on the program to run: batches have the same sizes, modes are the same, and
no rank has refused its batch. Otherwise the other ranks would wait in a collective for a rank that differs."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from moe.parallel.collective import all_gather_single, collective
from moe.parallel.json_collectives import cpu_group
from moe.sharding.exchange.mesh import Mesh

REFUSED = 0
"""Signature of a call whose batch is refused."""


def signature_of(*decisive: Any) -> int:
    """Hash of the values that decide which program runs; never `REFUSED`."""
    return int.from_bytes(hashlib.blake2b(repr(decisive).encode(), digest_size=7).digest(), "little") + 1


def can_agree(mesh: Mesh) -> bool:
    """Whether there are other ranks to agree with."""
    return mesh.num_ranks > 1 and dist.is_initialized()


def agree(mesh: Mesh, signature: int) -> None:
    """Raise ValueError if any rank has refused its batch or calls with another signature; a rank that has refused its
    own batch raises its own error instead. All ranks call it. Signatures are exchanged on the CPU: on a GPU, the
    exchange would wait for the work in its stream."""
    gathered_signatures = torch.empty(mesh.num_ranks, dtype=torch.int64)
    with collective("agreement on the batch's sizes"):
        all_gather_single(gathered_signatures, torch.tensor([signature]), group=cpu_group())
    if signature == REFUSED or bool((gathered_signatures == signature).all()):
        return
    signatures = gathered_signatures.tolist()
    if refusing := [str(rank) for rank, signature_of_rank in enumerate(signatures) if signature_of_rank == REFUSED]:
        raise ValueError(f"the batch was refused on rank {', '.join(refusing)}; see the error there")
    unlike = [str(rank) for rank, signature_of_rank in enumerate(signatures) if signature_of_rank != signatures[0]]
    raise ValueError(
        f"batch sizes or mode (train or eval, with or without gradients) of rank {', '.join(unlike)} differ from those "
        "of rank 0; call all ranks alike"
    )
