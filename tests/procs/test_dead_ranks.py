"""A rank that dies or stops in a collective: the others end with an error that names the collective."""

import os
import pickle
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from moe.parallel import CollectiveError
from tests.grid import item_params
from tests.parity.combinations import model_of
from tests.parity.gloo_ranks import rank_processes, receive
from tests.parity.trajectory import Degrees, Shape, rank_batch
from tests.processes import DEADLINE_S

TIMEOUT_S = {signal.SIGKILL: DEADLINE_S, signal.SIGSTOP: 20.0}
"""Timeouts of collectives. A dead rank is noticed at once. A stopped one is noticed only by the timeout, which set-up
and a whole pass must meet, too, on a slow machine."""


def run_twice(
    rank: int, degrees: Degrees, rendezvous: str, victim: int, blow: int, place: str, answer: Connection
) -> None:
    """Run two passes; rank 0 sends its error, or None. In the second pass the rank `victim`, which works with rank 0,
    sends itself the signal `blow` at `place`."""
    try:
        _run_twice(rank, degrees, rendezvous, blow, rank == victim, place)
        failure = None
    except Exception as error:
        failure = pickle.dumps(error)
    if rank == 0:
        answer.send(failure)
    os._exit(0)  # a group with a dead rank does not take part in its own shutdown


def _run_twice(rank: int, degrees: Degrees, rendezvous: str, blow: int, is_victim: bool, place: str) -> None:
    # Their imports are loaded already (`forkserver_with_torch`).
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
        if is_victim:
            os.kill(os.getpid(), blow)

    def strike_when_gradient_of(rows: Any) -> None:
        rows.register_hook(strike)

    def run(is_second: bool) -> None:
        *_, layer = MoELayers(model, layout).local_layers.values()
        batch = rank_batch(layout, degrees.plan(8), Shape(), 300, 1).micro_batches[0]
        if is_second and place == "forward":
            layer.register_forward_pre_hook(strike)
        if is_second and place == "experts' backward":
            layer.experts.register_forward_pre_hook(lambda _, inputs: strike_when_gradient_of(inputs[0]))
        y = model.hidden_states(batch.source, batch.target_in, batch.context)
        if is_second and place == "backward":
            y.register_hook(strike)
        y.sum().backward()
        if is_second and place == "gradients":
            strike()
        reduce_gradients(local_parameters(model), layout)

    run(is_second=False)
    run(is_second=True)


EXPERTS, TENSOR, DATA = Degrees(expert=2, data=2), Degrees(data=2, tensor=2), Degrees(data=2)
FSDP, HSDP = Degrees(data=2, fsdp=2, expert_fsdp=2), Degrees(data=4, fsdp=2)


CASES: list[tuple[Degrees, int, str, tuple[str, ...]]] = [
    (EXPERTS, 1, "forward", ("all-to-all of", "MoE layer 3")),
    (EXPERTS, 1, "backward", ("all-to-all of", "MoE layer 3")),
    (Degrees(expert=2), 1, "backward", ("all-to-all of", "MoE layer 3")),  # over the default group
    (TENSOR, 1, "forward", ("over the tensor axis", "layer 3")),
    (DATA, 1, "gradients", ("all-reduce of gradients",)),
    (FSDP, 1, "forward", ("all-gather of parameters, experts of layer 3",)),
    (HSDP, 1, "backward", ("all-gather of parameters, layer 2",)),  # the gather of layer 3 came earlier
    (HSDP, 2, "backward", ("all-reduce of gradients over replicas, layer 3",)),
    (FSDP, 1, "experts' backward", ("reduce-scatter of gradients, experts of layer 3",)),
    (Degrees(data=2, context=2), 1, "forward", ("all-gather of positions over the context axis, layer 3",)),
    (Degrees(data=2, context=2), 1, "backward", ("of positions over the context axis, layer 3",)),
]
WAITED_FOR = [CASES[number] for number in (1, 2, 3, 7)]
"""One case for each kind of process group: each waits for a collective's timeout."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    item_params([(signal.SIGKILL, *case) for case in CASES] + [(signal.SIGSTOP, *case) for case in WAITED_FOR], 2),
)
def test_others_name_the_collective(
    tmp_path: Path, case: tuple[signal.Signals, Degrees, int, str, tuple[str, ...]]
) -> None:
    blow, degrees, victim, place, expected_words = case
    arguments = (degrees, f"{tmp_path}/rendezvous", victim, int(blow), place)
    with rank_processes(run_twice, degrees.workers, *arguments, patience_s=0.0) as (rank_0, *_):
        answer = receive(rank_0)
    error = answer and pickle.loads(answer)
    assert isinstance(error, CollectiveError), error
    for words in (*expected_words, f"rank 0 of {degrees.workers}"):
        assert words in str(error)
