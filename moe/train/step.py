"""One training step."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from moe.parallel import SequenceParallel, clip_factor, global_norm
from moe.parallel.problems import raise_on_all_ranks
from moe.records import StepRecord
from moe.tasks.task import RankBatch, Task
from moe.train.optimizer.build import update_parameters
from moe.train.optimizer.schedule import learning_rate
from moe.train.signals import Signals
from moe.train.summed_totals import SummedTotals
from moe.train.totals import StepTotals
from moe.train.train_state import TrainState


@dataclass(frozen=True)
class StepResult:
    """Result of one step; the same on every rank."""

    totals: SummedTotals
    lr: float
    task: Task[Any, Any]

    @property
    def record(self) -> StepRecord:
        """Record of the step, without timings. If not finite, neither this step nor a later one has updated anything.
        Waits for the step's gradients, not for later work."""
        record = self.totals.record
        numbers = None if record.numbers is None else dict(self.task.derived_numbers(record.numbers))
        return replace(record, lr=self.lr, numbers=numbers)

    @property
    def signals(self) -> Signals:
        """Summed over all ranks."""
        return self.totals.signals


def step(state: TrainState, batch: RankBatch[Any], signals: Signals) -> StepResult:
    """Run one training step: forward, backward, clip, update. Collective.

    Loss = task objective / target tokens + sum over MoE layers of coefficient * mean auxiliary loss, over the global
    batch, so that the ranks' gradients sum to the full gradient under any layout. MoE layers add their auxiliary
    losses in the backward pass.

    A step whose loss or gradient norm is not finite updates nothing. On a CPU the host decides that; a GPU decides
    itself, by `state.found_inf`, so that the host need not wait for it.

    Raises SpecError on all ranks, without an update, if any of them cannot record a graph of a micro-batch.
    """
    task, layout, updated, train = state.task, state.layout, state.shards.parameters, state.task.spec.train
    state.passes.discard_gradients()
    batch = task.with_estimates(state.model, batch, layout)
    totals = StepTotals(state.moe_layers, batch, layout, shares_tokens=isinstance(state.model, SequenceParallel))
    state.passes.add_gradients(batch, totals)

    state.reduction.finish()
    grad_norm = global_norm(updated, layout)
    signals = replace(signals, num_graphs_failed=int(bool(state.passes.problems)))
    sums, lr = totals.reduce(signals, grad_norm), learning_rate(train, batch.step)
    result = StepResult(sums, lr, task)
    if sums.signals.num_graphs_failed:
        raise_on_all_ranks(state.passes.problems)
    if state.found_inf is not None:
        torch.maximum(state.found_inf, sums.found_inf(), out=state.found_inf)
    elif not sums.record.is_finite:
        return result

    factor = None if train.clip_norm is None else clip_factor(grad_norm, train.clip_norm)
    with state.shards.changing():
        update_parameters(state.optimizer, updated, lr, factor, state.found_inf)
    if state.average is not None:
        state.average.update(batch.step, state.found_inf)
    for number, layer in state.moe_layers.local_layers.items():
        layer.end_step(totals.expert_choices(number), state.found_inf)
    return result
