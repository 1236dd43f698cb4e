"""What a rank holds of each parameter: its initial values, its gradient, and where it lies in the whole."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from moe.parallel.layout import Layout, mesh_of
from moe.random import init_uniform_
from moe.spec import Problem, SpecError


@dataclass(frozen=True)
class Part:
    """Where a rank's part of a parameter lies in the whole."""

    shape: torch.Size
    """Of the whole."""
    cuts: tuple[tuple[str, int], ...] = ()
    """(mesh axis, dimension cut up over it), one after the other."""
    of_experts: bool = False
    """Whether the first dimension counts experts, which have statistics of their own."""

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for axis, _ in self.cuts)


def new_parameter(
    shape: tuple[int, ...],
    std: float | None,
    layout: Layout,
    *,
    name: str,
    seed: int,
    dtype: torch.dtype,
    cuts: Mapping[str, int] | None = None,
    of_experts: bool = False,
) -> nn.Parameter:
    """This rank's part of a parameter of this shape, each mesh axis in `cuts` dividing the dimension beside it.

    Its values are those that the whole would have there: Uniform(±√3·std) keyed by (seed, name, element), or ones
    where `std` is None. Raises SpecError where a dimension does not divide.
    """
    divided = tuple((axis, dim) for axis, dim in (cuts or {}).items() if layout.degree(axis) > 1)
    part = Part(torch.Size(shape), divided, of_experts)
    sizes, first = list(shape), [0] * len(shape)
    for axis, dim in part.cuts:
        if sizes[dim] % layout.degree(axis):
            raise SpecError(Problem(f"{name}.shape[{dim}]", sizes[dim],
                                    f"must be divisible by the {axis} degree (={layout.degree(axis)})",
                                    "use another size, or a degree that divides it"))  # fmt: skip
        sizes[dim] //= layout.degree(axis)
        first[dim] += layout.index(axis) * sizes[dim]
    parameter = nn.Parameter(torch.ones(sizes, dtype=dtype, device=layout.device))
    if std is not None:
        init_uniform_(parameter, std, seed, name, shape, first)
    parameter.part = part  # type: ignore[attr-defined]
    return parameter


@dataclass(frozen=True)
class Held:
    """A parameter as this rank holds it."""

    name: str
    parameter: nn.Parameter
    """The model's: a plain tensor, or a DTensor where it is gathered to be used."""
    local: nn.Parameter
    """The same memory, always plain: what optimizers change."""
    part: Part


def held_parameters(model: nn.Module) -> list[Held]:
    """Every parameter of a model, each once, in order."""
    found = []
    for name, parameter in model.named_parameters():
        local = parameter
        if isinstance(parameter, DTensor):
            whole: DTensor = parameter.data  # type: ignore[assignment]
            local = nn.Parameter(whole.to_local())
        found.append(Held(name, parameter, local, part_of(parameter)))
    return found


def to_global(local: Tensor, part: Part, layout: Layout) -> Tensor:
    """A DTensor over the whole of which `local` is this rank's part, in the same memory; plain where it is the
    whole. What the same part's replicas hold is not said: a checkpoint keeps one of them."""
    if not part.cuts:
        return local.detach()
    mesh = mesh_of(layout, tuple(axis for axis, _ in part.cuts))
    return DTensor.from_local(
        local.detach(),
        mesh,
        [Shard(dim) for _, dim in part.cuts],
        run_check=False,
        shape=part.shape,
        stride=torch.empty(part.shape, device="meta").stride(),
    )


def part_of(parameter: nn.Parameter) -> Part:
    """What `new_parameter` noted of it."""
    part: Part = parameter.part  # type: ignore[attr-defined]
    return part


def further_cut(part: Part, axis: str, dim: int) -> Part:
    return replace(part, cuts=(*part.cuts, (axis, dim)))
