"""A rank's part of each parameter: its initial values, its gradient, and where it lies in the whole."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from moe.parallel.mesh import EXPERT_AXES, Layout, mesh_of
from moe.parallel.tensor import SharesTokens
from moe.plan.placement import FSDP_AXES
from moe.random import init_uniform_
from moe.spec import Problem, SpecError
from moe.spec.parameter import Parameter

Splits = tuple[tuple[str, int], ...]
"""(mesh axis, dimension split over it), one after the other."""


@dataclass(frozen=True)
class Part:
    """Place of a rank's part of a parameter in the whole."""

    shape: torch.Size
    """Of the whole."""
    splits: Splits = ()
    of_experts: bool = False
    """Whether the first dimension counts experts, which have statistics of their own."""
    shares_tokens: bool = False
    """Whether tensor ranks that all have it use it on their own shares of the tokens, so that gradients add up."""
    std: float | None = None
    """Standard deviation of the initial values; None begins with ones."""

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for axis, _ in self.splits)


def declare(
    module: nn.Module, parameters: Iterable[Parameter], dtype: torch.dtype = torch.float32, seed: int = 0
) -> None:
    """Give a module the parameters of a table, where its submodules have a place for them.

    On the default device, with their initial values; on the meta device without any, for `place` to come.
    """
    for each in parameters:
        path, _, name = each.name.rpartition(".")
        owner, part = (
            module.get_submodule(path),
            Part(torch.Size(each.shape), (), each.of_experts, std=each.std),
        )
        assert name in owner._parameters, f"{type(owner).__name__} has no {name}"
        parameter = nn.Parameter(torch.ones(each.shape, dtype=dtype))
        parameter.part = part  # type: ignore[attr-defined]
        if not parameter.is_meta and each.std is not None:
            init_uniform_(parameter, each.std, seed, each.name)
        setattr(owner, name, parameter)


def place(model: nn.Module, path: str, splits: Splits, layout: Layout, seed: int) -> None:
    """Leave a model this rank's part of one of its parameters, on the layout's device, split so over mesh axes.

    Its values are those that the whole has there; where it lies on the meta device, initial ones as it was declared,
    keyed by (seed, path, element). Raises SpecError where a degree does not divide a dimension, and for one that lies
    on the meta device and was not declared.
    """
    within, _, name = path.rpartition(".")
    owner = model.get_submodule(within)
    whole = getattr(owner, name)
    declared: Part | None = getattr(whole, "part", None)
    if whole.is_meta and declared is None:
        raise SpecError(Problem(path, None, "lies on the meta device and has no initial values",
                                "declare it, or make the model on a device"))  # fmt: skip
    in_experts = any(axis in EXPERT_AXES for axis, _ in splits)
    part = replace(
        declared or Part(whole.shape, of_experts=in_experts), splits=splits, shares_tokens=_shares_tokens(model, within)
    )  # fmt: skip
    sizes, first = _extent(part, layout, path)
    if whole.is_meta:
        parameter = nn.Parameter(torch.ones(sizes, dtype=whole.dtype, device=layout.device))
        if part.std is not None:
            init_uniform_(parameter, part.std, seed, path, whole.shape, first)
    else:
        values = whole.detach()
        for dim, (start, size) in enumerate(zip(first, sizes, strict=True)):
            values = values.narrow(dim, start, size)
        parameter = nn.Parameter(values.to(layout.device, copy=True))
    parameter.part = part  # type: ignore[attr-defined]
    setattr(owner, name, parameter)


def _shares_tokens(model: nn.Module, path: str) -> bool:
    """Whether a module is one of which tensor ranks have shares of the tokens, or lies in one."""
    steps = path.split(".")
    within = (model.get_submodule(".".join(steps[:depth])) for depth in range(len(steps) + 1))
    return any(isinstance(module, SharesTokens) for module in within)


def _extent(part: Part, layout: Layout, name: str) -> tuple[list[int], list[int]]:
    """(sizes of this rank's part, where it begins in the whole)."""
    sizes, first = list(part.shape), [0] * len(part.shape)
    for axis, dim in part.splits:
        if sizes[dim] % layout.degree(axis):
            raise SpecError(Problem(f"{name}.shape[{dim}]", sizes[dim],
                                    f"must be divisible by the {axis} degree (={layout.degree(axis)})",
                                    "use another size, or a degree that divides it"))  # fmt: skip
        sizes[dim] //= layout.degree(axis)
        first[dim] += layout.index(axis) * sizes[dim]
    return sizes, first


def first_of(part: Part, layout: Layout) -> list[int]:
    """First index, by dimension, in the whole of what this rank computes with: its part, or what FSDP gathers."""
    splits = tuple((axis, dim) for axis, dim in part.splits if axis not in FSDP_AXES)
    return _extent(replace(part, splits=splits), layout, "a parameter")[1]


@dataclass(frozen=True)
class LocalParameter:
    """A parameter as this rank holds it."""

    name: str
    parameter: nn.Parameter
    """The model's: a plain tensor, or a DTensor where it is gathered to be used."""
    local: nn.Parameter
    """The same memory, always plain: what optimizers change."""
    part: Part


def local_parameters(model: nn.Module) -> list[LocalParameter]:
    """Every parameter of a model, each once, in order."""
    found = []
    for name, parameter in model.named_parameters():
        local = parameter
        if isinstance(parameter, DTensor):
            whole: DTensor = parameter.data  # type: ignore[assignment]
            local = nn.Parameter(whole.to_local())
        found.append(LocalParameter(name, parameter, local, part_of(parameter)))
    return found


def to_global(local: Tensor, part: Part, layout: Layout) -> Tensor:
    """A DTensor over the whole of which `local` is this rank's part, in the same memory; plain where it is the
    whole. What the same part's replicas hold is not said: a checkpoint keeps one of them."""
    if not part.splits:
        return local.detach()
    mesh = mesh_of(layout, tuple(axis for axis, _ in part.splits))
    return DTensor.from_local(
        local.detach(),
        mesh,
        [Shard(dim) for _, dim in part.splits],
        run_check=False,
        shape=part.shape,
        stride=torch.empty(part.shape, device="meta").stride(),
    )


def part_of(parameter: nn.Parameter) -> Part:
    """Part of the whole that a declared parameter is."""
    part: Part = parameter.part  # type: ignore[attr-defined]
    return part


def split_further(part: Part, axis: str, dim: int) -> Part:
    return replace(part, splits=(*part.splits, (axis, dim)))
