"""One training step."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from moe.parallel import SequenceParallel, clip_factor, discard_gradients, global_norm
from moe.records import StepRecord
from moe.tasks.task import RankBatch
from moe.train.optimizer.build import update_parameters
from moe.train.optimizer.schedule import learning_rate
from moe.train.totals import Signals, StepTotals
from moe.train.train_state import TrainState


@dataclass(frozen=True)
class StepResult:
    """Result of one step; the same on every rank."""

    record: StepRecord
    """Without timings. If not finite, no parameter was updated."""
    signals: Signals
    """Summed over all ranks."""


def step(state: TrainState, batch: RankBatch[Any], signals: Signals) -> StepResult:
    """Run one training step: forward, backward, clip, update. Collective.

    Loss = task objective / target tokens + sum over MoE layers of coefficient * mean auxiliary loss, over the global
    batch, so that the ranks' gradients sum to the full gradient under any layout. MoE layers add their auxiliary
    losses in the backward pass.
    """
    task, layout, parameters, train = state.task, state.layout, state.parameters, state.task.spec.train
    if state.graphs is None:
        discard_gradients(parameters)
    else:
        state.graphs.zero_gradients()
    batch = task.with_estimates(state.model, batch, layout)
    totals = StepTotals(state.moe_layers, batch, layout, shares_tokens=isinstance(state.model, SequenceParallel))
    for pass_number, micro_batch in enumerate(batch.micro_batches, 1):
        if state.graphs is not None:
            totals.add_sums(state.graphs.add_gradients(micro_batch, batch.num_targets))
            continue
        with state.moe_layers.routings() as routings:
            loss = task.loss(state.model, micro_batch)
        totals.add(loss, routings)
        is_last = pass_number == len(batch.micro_batches)
        with state.reduction.overlapping_backward() if is_last else nullcontext():
            (loss.objective / batch.num_targets).backward()

    state.reduction.finish()
    grad_norm = global_norm(parameters, layout)
    totals_record, signals = totals.reduce(signals, grad_norm)
    lr = learning_rate(train, batch.step)

    numbers = None if totals_record.numbers is None else dict(task.derived_numbers(totals_record.numbers))
    record = replace(totals_record, lr=lr, numbers=numbers)
    if record.is_finite:
        factor = None if train.clip_norm is None else clip_factor(grad_norm, train.clip_norm)
        update_parameters(state.optimizer, parameters, lr, factor)
        if state.average is not None:
            state.average.update(batch.step)
        for number, layer in state.moe_layers.local_layers.items():
            layer.end_step(totals.expert_choices(number))
    return StepResult(record, signals)
