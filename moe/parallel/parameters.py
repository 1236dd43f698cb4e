"""Which parameters are spread over the mesh, and their global form for checkpoints that fit any layout."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from moe.parallel.layout import Layout


def mark_expert(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter whose first dimension is this rank's share of the experts."""
    parameter.mesh_axis = "expert"  # type: ignore[attr-defined]
    return parameter


def is_expert(parameter: Tensor) -> bool:
    return getattr(parameter, "mesh_axis", None) == "expert"


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, the parameters spread over the expert axis; all others are replicated on every rank."""
    return {name: parameter for name, parameter in model.named_parameters() if is_expert(parameter)}


def to_global(tensor: Tensor, layout: Layout) -> Tensor:
    """A DTensor over the whole of what `tensor` is this rank's share of (first dimension, expert axis).

    The tensor itself where one process holds everything.
    """
    if layout.mesh is None:
        return tensor
    return DTensor.from_local(tensor, layout.mesh, [Replicate(), Shard(0)], run_check=False)


def sharded_state(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The parameters and buffers by name: those of experts as DTensors, the rest as they are. They share memory with
    the model, so loading into them in place loads the model."""
    return {
        name: to_global(tensor.detach(), layout) if is_expert(tensor) else tensor.detach()
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
