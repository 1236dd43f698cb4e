"""A rank's state of a model in training."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe.parallel import Layout, LocalParameter, local_parameters
from moe.tasks.task import Task
from moe.train.moe_layers import MoELayers
from moe.train.optimizer.build import build_optimizer


@dataclass(frozen=True)
class TrainState:
    """A model with its optimizer, laid out. The model is any module: what a step needs of it is found in it."""

    task: Task[Any, Any]
    layout: Layout
    model: nn.Module
    parameters: list[LocalParameter]
    """Parameters of the model, as this rank has them."""
    optimizer: torch.optim.Optimizer
    moe_layers: MoELayers

    @classmethod
    def build(cls, task: Task[Any, Any], layout: Layout) -> "TrainState":
        """The state that a run begins with. All ranks call it together."""
        model = task.build_model(layout)
        parameters = local_parameters(model)
        optimizer = build_optimizer(task.spec.train.optimizer, parameters, layout)
        return cls(task, layout, model, parameters, optimizer, MoELayers(model))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the model computes in."""
        dtype: torch.dtype = getattr(torch, self.task.spec.train.dtype)
        return dtype
