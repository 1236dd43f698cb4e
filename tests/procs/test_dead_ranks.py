"""A rank that dies or stops in the midst of a collective: the others end with an error that says where."""

import os
import pickle
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from moe.parallel import CollectiveError
from tests.parity.gloo_ranks import many_with_torch
from tests.processes import DEADLINE_S

TIMEOUT_S = 4.0


def run_twice(rank: int, rendezvous: str, where: str, blow: int, answer: Connection) -> None:
    """Rank 0, which shares experts with rank 1 alone, answers with what went wrong. Rank 1 sends itself the signal
    `blow` where it is told to, in the second pass."""
    try:
        _run_twice(rank, rendezvous, where, blow)
        found = None
    except Exception as error:
        found = pickle.dumps(error)
    if rank == 0:
        answer.send(found)
    os._exit(0)  # a group with a dead rank does not take part in its own shutdown


def _run_twice(rank: int, rendezvous: str, where: str, blow: int) -> None:
    import torch
    import torch.distributed as dist

    from moe.layers import MoELayer
    from moe.parallel import Layout
    from moe.plan import Cluster, plan_job
    from moe.spec import JobSpec

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=4)
    spec = JobSpec.parse({
        "model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"}, "train": {"num_steps": 1},
        "resources": {"num_workers": 4}, "parallel": {"expert": 2},
    })  # fmt: skip
    assert spec.model.moe is not None
    cluster = Cluster(num_nodes=1, devices_per_node=4, device="cpu", memory_bytes=4 << 30)
    layer = MoELayer(
        spec.model.moe, layer=3, layout=Layout.build(plan_job(spec, cluster), timeout_s=TIMEOUT_S)
    )

    def strike(*_: Any) -> None:
        if rank == 1:
            os.kill(os.getpid(), blow)

    layer(torch.randn(64, spec.model.model_dim))
    if where == "forward":
        travelling = layer.experts.travelling
        layer.experts.travelling = lambda *given: (strike(), travelling(*given))[1]  # type: ignore[method-assign]
    y, _ = layer(torch.randn(64, spec.model.model_dim, requires_grad=True))
    y.register_hook(strike)
    y.sum().backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stops"])
def test_the_others_end_and_name_the_collective_the_layer_and_the_rank(
    tmp_path: Path, where: str, blow: signal.Signals
) -> None:
    context = many_with_torch()
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=run_twice, args=(rank, f"{tmp_path}/rendezvous", where, int(blow), theirs))
        for rank in range(4)
    ]
    began = time.monotonic()
    for process in processes:
        process.start()
    try:
        assert ours.poll(DEADLINE_S), "rank 0 hangs"
        answer = ours.recv()
        error = answer and pickle.loads(answer)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert isinstance(error, CollectiveError), error
    assert "all-to-all of" in str(error)
    assert "MoE layer 3" in str(error)
    assert "rank 0 of 4" in str(error)
    assert time.monotonic() - began < DEADLINE_S
