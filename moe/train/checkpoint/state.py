"""Model and optimizer tensors to checkpoint, under layout-independent names."""

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe.parallel import Layout, LocalParameter, ParameterShard, shard_of, to_global
from moe.train.checkpoint.tensor_piece import TensorPiece
from moe.train.optimizer.build import moments
from moe.train.weight_average import WeightAverage


def run_tensors(
    model: nn.Module,
    parameters: list[LocalParameter],
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    omitted_from_checkpoints: Collection[str] = (),
    average: WeightAverage | None = None,
    updated: list[LocalParameter] | None = None,
) -> dict[str, Tensor | TensorPiece]:
    """Tensors named `model.<parameter>`, `optimizer.<slot>.<parameter>` and `ema.<parameter>`, except parameters
    `omitted_from_checkpoints`. `updated` is what the optimizer updates, if not `parameters`.

    Sharded ones are DTensors, or `TensorPiece` in user modules. All share memory with the model and the optimizer:
    loading in place restores the run.
    """
    tensors = {
        f"model.{parameter.name}": _global_tensor(parameter.local, parameter.part, layout)
        for parameter in parameters if parameter.name not in omitted_from_checkpoints
    }  # fmt: skip
    for name, buffer in model.named_buffers():
        part = shard_of(buffer)
        # A sharded user module replaces its buffers after each step that changes them.
        read_buffer = partial(_local_buffer, model, name)
        tensors[f"model.{name}"] = (
            buffer if part.offsets is None else TensorPiece(part.shape, part.offsets, read_buffer)
        )
    for name, slot, tensor, part in moments(optimizer, parameters if updated is None else updated):
        tensors[f"optimizer.{slot}.{name}"] = _global_tensor(tensor, part, layout)
    if average is not None:
        for parameter, tensor in zip(average.parameters, average.tensors, strict=True):
            tensors[f"ema.{parameter.name}"] = _global_tensor(tensor, parameter.part, layout)
    return tensors


def _local_buffer(model: nn.Module, name: str) -> Tensor:
    buffer = model.get_buffer(name)
    return buffer.to_local() if isinstance(buffer, DTensor) else buffer


def _global_tensor(local: Tensor, part: ParameterShard, layout: Layout) -> Tensor | TensorPiece:
    if part.offsets is None:
        return to_global(local, part, layout)
    return TensorPiece(part.shape, part.offsets, local.detach)
