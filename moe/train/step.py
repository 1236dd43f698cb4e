"""One training step, top to bottom."""

from dataclasses import dataclass, replace

import torch

from moe.parallel import Layout, clip_by_global_norm, forget_gradients, reduce_gradients
from moe.records import StepRecord
from moe.routing import Routing
from moe.spec import TrainSpec
from moe.tasks.translation import TranslationModel
from moe.tasks.translation.loss import smoothed_nll
from moe.train.batches import RankBatch
from moe.train.optimizer.build import set_learning_rate
from moe.train.optimizer.schedule import learning_rate
from moe.train.totals import Signals, StepTotals


@dataclass(frozen=True)
class StepResult:
    """Findings of one step over the global batch; the same on every rank."""

    record: StepRecord
    """Without the time that the step took. Where it is not finite, nothing was updated."""
    signals: Signals
    """Of all ranks, summed."""


def step(
    model: TranslationModel,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    train: TrainSpec,
    batch: RankBatch,
    signals: Signals,
) -> StepResult:
    """Take one step: all ranks together, each with its micro-batches of the same global batch.

    loss = smoothed nll / real target tokens + sum over MoE layers of coefficient * mean auxiliary losses,
    all over the global batch, so that a rank's gradients add up to the whole whatever the layout. The auxiliary
    losses enter the backward pass in the layers themselves.
    """
    forget_gradients(model.held)
    totals = StepTotals(model.spec, batch, layout)
    for micro_batch in batch.micro_batches:
        routings: list[Routing] = []
        hidden = model.hidden(micro_batch.source, micro_batch.target_in, micro_batch.context, routings)
        smoothed, nll = smoothed_nll(
            hidden, model.output_embedding, model.share(micro_batch.target_out), train.label_smoothing
        )
        totals.add(smoothed, nll, routings)
        (smoothed / batch.target.num_tokens).backward()

    totals.add_traffic(model.take_traffic())
    reduce_gradients(model.held, layout)
    found, signals = totals.reduce(signals)
    grad_norm = float(clip_by_global_norm(model.held, layout, train.clip_norm))
    lr = learning_rate(train, batch.step)

    record = replace(found, grad_norm=grad_norm, lr=lr)
    if record.is_finite:
        set_learning_rate(optimizer, lr)
        optimizer.step()
        for layer, chosen in zip(model.moe_layers(), totals.chosen, strict=True):
            layer.end_step(chosen)
    return StepResult(record, signals)
