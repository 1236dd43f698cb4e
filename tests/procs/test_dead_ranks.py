"""A rank that dies or stops in the midst of a collective: the others end with an error that says where."""

import os
import pickle
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from moe.parallel import CollectiveError
from tests.grid import every
from tests.parity.combinations import model_of
from tests.parity.gloo_ranks import rank_processes, receive
from tests.parity.trajectory import Degrees, Shape, rank_batch
from tests.processes import DEADLINE_S

TIMEOUT_S = {signal.SIGKILL: DEADLINE_S, signal.SIGSTOP: 20.0}
"""Of collectives. A rank that dies is missed at once. One that stops is missed only by this, which set-up and a whole
pass have to keep, too, on a slow machine."""


def run_twice(
    rank: int, degrees: Degrees, rendezvous: str, struck: int, blow: int, where: str, answer: Connection
) -> None:
    """Rank 0 answers with what went wrong. The rank `struck`, which works with it, sends itself the signal `blow` where
    it is told to: in the midst of a pass after one that went well."""
    try:
        _run_twice(rank, degrees, rendezvous, blow, rank == struck, where)
        found = None
    except Exception as error:
        found = pickle.dumps(error)
    if rank == 0:
        answer.send(found)
    os._exit(0)  # a group with a dead rank does not take part in its own shutdown


def _run_twice(rank: int, degrees: Degrees, rendezvous: str, blow: int, struck: bool, where: str) -> None:
    # What these import is there already (`many_with_torch`).
    import torch
    import torch.distributed as dist

    from moe.interface import LOOPBACK, listen_on
    from moe.parallel import Layout, local_parameters, reduce_gradients
    from moe.tasks.translation import build_model
    from moe.train.moe_layers import MoELayers

    torch.set_num_threads(1)
    timeout_s = TIMEOUT_S[signal.Signals(blow)]
    at_most = timedelta(seconds=timeout_s)  # of the default group, where it serves for all ranks
    listen_on(LOOPBACK)
    dist.init_process_group("gloo", f"file://{rendezvous}", at_most, degrees.workers, rank)
    layout = Layout.build(degrees.plan(8), timeout_s=timeout_s)
    model = build_model(model_of(), layout)

    def strike(*_: Any) -> None:
        if struck:
            os.kill(os.getpid(), blow)

    def strike_when_gradient_of(rows: Any) -> None:
        rows.register_hook(strike)

    def run(again: bool) -> None:
        *_, layer = MoELayers(model).local_layers.values()
        batch = rank_batch(layout, degrees.plan(8), Shape(), 300, 1).micro_batches[0]
        if again and where == "forward":
            layer.register_forward_pre_hook(strike)
        if again and where == "experts' backward":
            layer.experts.register_forward_pre_hook(lambda _, given: strike_when_gradient_of(given[0]))
        y = model.hidden_states(batch.source, batch.target_in, batch.context)
        if again and where == "backward":
            y.register_hook(strike)
        y.sum().backward()
        if again and where == "gradients":
            strike()
        reduce_gradients(local_parameters(model), layout)

    run(again=False)
    run(again=True)


EXPERTS, TENSOR, DATA = Degrees(expert=2, data=2), Degrees(data=2, tensor=2), Degrees(data=2)
FSDP, HSDP = Degrees(data=2, fsdp=2, expert_fsdp=2), Degrees(data=4, fsdp=2)


CASES: list[tuple[Degrees, int, str, tuple[str, ...]]] = [
    (EXPERTS, 1, "forward", ("all-to-all of", "MoE layer 3")),
    (EXPERTS, 1, "backward", ("all-to-all of", "MoE layer 3")),
    (Degrees(expert=2), 1, "backward", ("all-to-all of", "MoE layer 3")),  # over the default group
    (TENSOR, 1, "forward", ("over the tensor axis", "layer 3")),
    (DATA, 1, "gradients", ("all-reduce of gradients",)),
    (FSDP, 1, "forward", ("all-gather of parameters, experts of layer 3",)),
    (HSDP, 1, "backward", ("all-gather of parameters, layer 2",)),  # that of layer 3 was ahead of it
    (HSDP, 2, "backward", ("all-reduce of gradients over replicas, layer 3",)),
    (FSDP, 1, "experts' backward", ("reduce-scatter of gradients, experts of layer 3",)),
]
WAITED_FOR = [CASES[number] for number in (1, 2, 3, 7)]
"""A group of each kind: each waits for the time of a collective."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", every([(signal.SIGKILL, *case) for case in CASES] + [(signal.SIGSTOP, *case) for case in WAITED_FOR], 2)
)
def test_others_name_the_collective(
    tmp_path: Path, case: tuple[signal.Signals, Degrees, int, str, tuple[str, ...]]
) -> None:
    blow, degrees, struck, where, said = case
    given = (degrees, f"{tmp_path}/rendezvous", struck, int(blow), where)
    with rank_processes(run_twice, degrees.workers, *given, patience_s=0.0) as (rank_0, *_):
        answer = receive(rank_0)
    error = answer and pickle.loads(answer)
    assert isinstance(error, CollectiveError), error
    for words in (*said, f"rank 0 of {degrees.workers}"):
        assert words in str(error)
