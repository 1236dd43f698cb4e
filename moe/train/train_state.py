"""Training state of one rank: model, optimizer, MoE layers."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe.kernels.support import check_kernels
from moe.parallel import GradientReduction, Layout, LocalParameter, OptimizerShards, local_parameters
from moe.parallel.accelerator import accelerator
from moe.parallel.pipeline import StageExecutor
from moe.tasks.task import Task
from moe.train.micro_batch_graphs import MicroBatchGraphs
from moe.train.moe_layers import MoELayers
from moe.train.narrow_matrices import narrow_matrices
from moe.train.optimizer.build import build_optimizer
from moe.train.passes import Passes, ScheduledPasses
from moe.train.weight_average import WeightAverage


@dataclass(frozen=True)
class TrainState:
    """A model laid out for training, with its optimizer."""

    task: Task[Any, Any]
    layout: Layout
    model: nn.Module
    parameters: list[LocalParameter]
    """This rank's parameters."""
    shards: OptimizerShards
    """Parameters, or shards of them, that this rank updates."""
    optimizer: torch.optim.Optimizer
    moe_layers: MoELayers
    reduction: GradientReduction
    passes: Passes
    """CUDA graphs with `train.cuda_graphs`, or a pipeline schedule's actions."""
    average: WeightAverage | None = None
    """Moving average of the weights, with `train.ema_decay`."""
    found_inf: Tensor | None = None
    """float32 scalar on a GPU, 1 from the first step on whose loss or gradient norm was not finite: updates have no
    effect then. None on CPUs, where the host skips the update."""

    @classmethod
    def build(cls, task: Task[Any, Any], layout: Layout) -> "TrainState":
        """Initial state of a run. Collective over the layout. Raises SpecError if it cannot be run as the spec says."""
        check_kernels(layout.device, is_alone=layout.world_group is None)
        model = task.build_model(layout)
        parameters = local_parameters(model)
        shards = OptimizerShards(parameters, layout)
        optimizer = build_optimizer(task.spec.train.optimizer, shards.parameters, layout)
        reduction, moe_layers = GradientReduction(parameters, layout, shards.sharded), MoELayers(model, layout)
        moe_layers.choose_dispatchers(layout, getattr(torch, task.spec.train.dtype), task.spec.parallel.dispatch)
        if task.spec.train.cuda_graphs:
            passes: Passes = MicroBatchGraphs(task, layout, model, parameters, moe_layers)
        else:
            with_gradients = [*parameters, *shards.parameters]
            executor = StageExecutor(model, layout)
            passes = ScheduledPasses(task, model, moe_layers, executor, reduction, with_gradients)
        average = None
        if task.spec.train.ema_decay is not None:
            average = WeightAverage(task.spec.train.ema_decay, model, shards)
        found_inf = torch.zeros((), device=layout.device) if accelerator(layout.device).runs_ahead else None
        return cls(
            task=task, layout=layout, model=model, parameters=parameters, shards=shards, optimizer=optimizer,
            moe_layers=moe_layers, reduction=reduction, passes=passes, average=average,
            found_inf=found_inf,
        )  # fmt: skip

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has the weights to evaluate."""
        if self.average is None or not self.task.spec.train.evaluation.use_ema:
            return nullcontext()
        return self.average.in_place_of_weights()

    def shard_masters(self) -> None:
        """Shard the float32 values of matrices that are computed with in a narrower dtype, where the optimizer's state
        is sharded. To be called once the weights have their initial values."""
        self.shards.shard_masters(narrow_matrices(self.parameters, self.model), self.dtype)

    @property
    def stored_parameters(self) -> list[LocalParameter]:
        """Parameters, or this rank's shards of them, with the values that a checkpoint stores."""
        return self.shards.with_masters(self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the model."""
        dtype: torch.dtype = getattr(torch, self.task.spec.train.dtype)
        return dtype
