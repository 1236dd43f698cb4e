"""Everything a run must remember between steps, by names that no layout changes."""

import torch
from torch import Tensor

from moe.models import TranslationModel
from moe.parallel import Layout, is_expert, sharded_state, to_global
from moe.train.optimizer import moments


def run_tensors(
    model: TranslationModel, optimizer: torch.optim.Optimizer, layout: Layout
) -> dict[str, Tensor]:
    """`model.<parameter>` and `optimizer.<slot>.<parameter>`: DTensors of what is spread over ranks, the rest plain.

    They share memory with the model and the optimizer: loading into them in place restores the run.
    """
    tensors = {f"model.{name}": tensor for name, tensor in sharded_state(model, layout).items()}
    parameters = dict(model.named_parameters())
    for name, slot, tensor in moments(optimizer, model):
        shared = to_global(tensor, layout) if is_expert(parameters[name]) else tensor
        tensors[f"optimizer.{slot}.{name}"] = shared
    return tensors
