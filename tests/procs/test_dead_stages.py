"""A rank of a pipeline that dies or stops: the others end with an error that names stage, action, micro-batch and
rank."""

import os
import pickle
import re
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from moe.parallel import CollectiveError
from moe.plan.schedule import Action
from tests.grid import item_params
from tests.parity.combinations import train_of
from tests.parity.gloo_ranks import rank_processes, receive
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees, Shape
from tests.processes import DEADLINE_S

TIMEOUT_S = {signal.SIGKILL: DEADLINE_S, signal.SIGSTOP: 20.0}
"""Timeouts of transfers. A dead rank is noticed at once, a stopped one by the timeout alone."""
MODEL = language_model(next(iter(ATTENTIONS))).model_copy(update={"num_layers": 4})


def run_steps(
    rank: int, degrees: Degrees, rendezvous: str, victim: int, blow: int, place: Action, answer: Connection
) -> None:
    """Run two steps; a rank sends its error, or None. In the second step the rank `victim` sends itself the signal
    `blow` before the action `place`."""
    try:
        _run_steps(rank, degrees, rendezvous, blow, place if rank == victim else None)
        failure = None
    except Exception as error:
        failure = pickle.dumps(error)
    answer.send(failure)
    os._exit(0)  # a group with a dead rank does not take part in its own shutdown


def _run_steps(rank: int, degrees: Degrees, rendezvous: str, blow: int, place: Action | None) -> None:
    # Their imports are loaded already (`forkserver_with_torch`).
    import torch
    import torch.distributed as dist

    from moe.interface import LOOPBACK, listen_on
    from moe.parallel import Layout
    from moe.train.signals import Signals
    from moe.train.step import step
    from tests.parity.trajectory import batch_of, state_of

    torch.set_num_threads(1)
    timeout_s = TIMEOUT_S[signal.Signals(blow)]
    listen_on(LOOPBACK)
    dist.init_process_group("gloo", f"file://{rendezvous}", timedelta(seconds=timeout_s), degrees.workers, rank)
    plan = degrees.plan(Shape().groups)
    layout = Layout.build(plan, timeout_s=timeout_s)
    state = state_of(MODEL, train_of(), layout)
    for number in (1, 2):
        if place is not None and number == 2:
            strike_at(place, state.passes.executor, blow)  # type: ignore[attr-defined]
        step(state, batch_of(layout, plan, Shape(), MODEL, number), Signals())


def strike_at(place: Action, executor: object, blow: int) -> None:
    """Let this process send itself the signal `blow` before an action."""
    name = "forward" if place.kind == "forward" else "backward"
    run = getattr(executor, name)

    def strike_and_run(action: Action, *arguments: object) -> object:
        if action == place:
            os.kill(os.getpid(), blow)
        return run(action, *arguments)

    setattr(executor, name, strike_and_run)


PIPELINE = Degrees(pipeline=4, micro_batch_groups=1)
CASES = [
    (PIPELINE, 2, Action("forward", 2, 1), 3, "hidden states from stage 2 on rank 2 to stage 3 on rank 3",
     "forward of stage 3, micro-batch 1"),
    (PIPELINE, 3, Action("backward", 3, 0), 2, "stage 3 on rank 3", r"\w+ of stage 2, micro-batch [01]"),
    (Degrees(pipeline=2, virtual_stages=2, micro_batch_groups=1), 1, Action("forward", 3, 0), 0,
     "on rank 1 to stage 2 on rank 0", r"\w+ of stage 2, micro-batch [01]"),
    (Degrees(pipeline=2, schedule="zero_bubble", micro_batch_groups=1), 0, Action("backward_weight", 0, 1), 1,
     "stage 0 on rank 0", r"\w+ of stage 1, micro-batch [234]"),
    (Degrees(pipeline=2, expert=2, micro_batch_groups=1), 3, Action("backward", 1, 2), 2,
     "all-to-all of", "backward of stage 1, micro-batch 2"),
]  # fmt: skip
"""(layout, rank that ends, before its action, another rank, and the words of its error)."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", item_params([(blow, *case) for blow in (signal.SIGKILL, signal.SIGSTOP) for case in CASES], 3)
)
def test_others_name_stage_action_micro_batch_and_rank(
    tmp_path: Path, case: tuple[signal.Signals, Degrees, int, Action, int, str, str]
) -> None:
    blow, degrees, victim, place, observer, transfer, action = case
    arguments = (degrees, f"{tmp_path}/rendezvous", victim, int(blow), place)
    with rank_processes(run_steps, degrees.workers, *arguments, patience_s=0.0) as connections:
        answers = {rank: receive(pipe) for rank, pipe in enumerate(connections) if rank != victim}
    for rank, answer in answers.items():
        error = answer and pickle.loads(answer)
        assert isinstance(error, CollectiveError), error
        assert f"failed on rank {rank} of {degrees.workers}" in str(error)
        assert re.search(r"\(\w+ of stage \d, micro-batch \d\)", str(error)), error
    error = pickle.loads(answers[observer])
    assert transfer in str(error)
    assert re.search(rf"\({action}\)", str(error)), error
