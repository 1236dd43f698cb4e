"""Forward and backward passes of a step on this rank."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn

from moe.parallel import GradientReduction, LocalParameter, discard_gradients
from moe.parallel.pipeline import StageExecutor
from moe.parallel.side_by_side import side_by_side
from moe.plan.schedule import Action
from moe.spec import Problem
from moe.tasks.task import RankBatch, Task
from moe.train.moe_layers import MoELayers
from moe.train.totals import StepTotals


class Passes(ABC):
    """Forward and backward passes of a step's micro-batches."""

    problems: Sequence[Problem] = ()
    """Reasons for which this rank could not compute gradients; all ranks learn of them at the end of the step."""

    @abstractmethod
    def discard_gradients(self) -> None:
        """Begin a step, without the gradients of the last one."""

    @abstractmethod
    def add_gradients(self, batch: RankBatch[Any], totals: StepTotals) -> None:
        """Compute this rank's gradients of all micro-batches, and add their losses and statistics to `totals`.
        Collective. After an error nothing of the step is left but gradients, which the next step discards."""


class ScheduledPasses(Passes):
    """Passes by the actions of a pipeline schedule; without a pipeline, of the whole model."""

    def __init__(
        self,
        task: Task[Any, Any],
        model: nn.Module,
        moe_layers: MoELayers,
        executor: StageExecutor,
        reduction: GradientReduction,
        parameters: list[LocalParameter],
    ) -> None:
        """`parameters`: all that get gradients in a step, shards included."""
        self._task, self._model, self._moe_layers, self._parameters = task, model, moe_layers, parameters
        self._reduction, self.executor = reduction, executor

    def discard_gradients(self) -> None:
        discard_gradients(self._parameters)

    def add_gradients(self, batch: RankBatch[Any], totals: StepTotals) -> None:
        turns = self.executor.turns(len(batch.micro_batches))
        try:
            for number, turn in enumerate(turns, 1):
                runs = [partial(self._run, action, batch, totals, is_last=number == len(turns)) for action in turn]
                side_by_side(self.executor.device, *runs)
            self.executor.finish()
        except BaseException:
            self.executor.discard()
            raise

    def _run(self, action: Action, batch: RankBatch[Any], totals: StepTotals, *, is_last: bool) -> None:
        """Run a forward or backward pass of a micro-batch; `is_last`: the last one of the step."""
        if action.kind == "forward":
            micro_batch = batch.micro_batches[action.micro_batch]
            with self._moe_layers.routings() as routings:
                loss = self.executor.forward(action, partial(self._task.loss, self._model, micro_batch))
            totals.add(loss, routings, has_loss=self.executor.has_loss(action))
            return
        reduces = action.completes_backward
        with self._reduction.overlapping_backward(is_last=is_last) if reduces else nullcontext():
            self.executor.backward(action, batch.num_targets)
