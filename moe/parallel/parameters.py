"""Sharded parameters: each rank's part, its initial values, its gradient and its position in the whole."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from moe.parallel.derived_values import derived_values
from moe.parallel.mesh import Layout, mesh_of
from moe.parallel.quantized import QuantizedWeight, QuantScheme, blocks, put, quantize
from moe.parallel.tensor import SequenceParallel
from moe.plan.placement import FSDP_AXES
from moe.plan.profile import OURS
from moe.random import init_uniform_
from moe.spec import Problem, spec_error
from moe.spec.form import SCALES, stored_tensors
from moe.spec.parameter import Derivation, Parameter, Slices
from moe.spec.patterns import matches

Splits = tuple[tuple[str, int], ...]
"""(mesh axis, dimension sharded over it), applied in order."""


@dataclass(frozen=True)
class ParameterShard:
    """Position of a rank's part of a parameter in the whole."""

    shape: torch.Size
    """Shape of the whole parameter."""
    splits: Splits = ()
    of_experts: bool = False
    """Whether the first dimension is experts, which have optimizer statistics of their own."""
    shares_tokens: bool = False
    """Whether tensor-parallel ranks replicate it but process different tokens, so that its gradients are summed."""
    is_hidden_matrix: bool = False
    """Whether Muon updates it (`Parameter.is_hidden_matrix`)."""
    offsets: tuple[int, ...] | None = None
    """Start of the part in the whole, for a module laid out by `moe.sharding`, whose parts follow no axes of these
    meshes and may be uneven."""
    is_first: bool = True
    """Whether this rank is the first of those that hold this part."""
    optimizer_split: tuple[str, int] | None = None
    """FSDP's axis and the dimension over which only the optimizer's state of this part is sharded."""
    stage_copies: int = 1
    """Pipeline stages with a copy of the parameter: 2 for a tied table that the first and the last one have."""

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for axis, _ in self.splits)

    @property
    def is_vector(self) -> bool:
        """Whether the parameter, or each expert's part of it, is a vector or scalar."""
        return len(self.shape) - self.of_experts < 2


def declare(
    module: nn.Module, parameters: Iterable[Parameter], dtype: torch.dtype = torch.float32, seed: int = 0
) -> None:
    """Register the declared parameters in the submodules that have slots for them, quantized ones as codes and scales
    (`moe.spec.form`).

    On the default device they have initial values; on the meta device they get them from `place`.
    """
    for declaration in parameters:
        path, _, own_name = declaration.name.rpartition(".")
        owner = module.get_submodule(path)
        assert own_name in owner._parameters, f"{type(owner).__name__} has no {own_name}"
        for tensor, item_dtype in stored_tensors(declaration):
            name, tensor_dtype = tensor.name.rpartition(".")[2], getattr(torch, item_dtype) if item_dtype else dtype
            parameter = nn.Parameter(torch.ones(tensor.shape, dtype=tensor_dtype), requires_grad=not declaration.frozen)
            parameter.part = ParameterShard(  # type: ignore[attr-defined]
                torch.Size(tensor.shape), of_experts=declaration.of_experts,
                is_hidden_matrix=declaration.is_hidden_matrix,
            )  # fmt: skip
            if not parameter.is_meta:
                _begin(parameter, name, declaration, seed, declaration.name)
            owner.register_parameter(name, parameter)
            owner.declared = {**_declared_in(owner), name: declaration}  # type: ignore[assignment]


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Disable gradients of the parameters whose names match a pattern."""
    for name, parameter in model.named_parameters():
        if any(matches(pattern, name) for pattern in patterns):
            parameter.requires_grad_(False)


def _begin(
    values: Tensor,
    name: str,
    declaration: Parameter,
    seed: int,
    path: str,
    full_shape: Sequence[int] | None = None,
    first: Sequence[int] | None = None,
) -> None:
    """Initialize a parameter of ones called `name`, or a part of it, keyed by (seed, path, element). Codes and scales
    are quantized from their matrix's initial values."""
    scheme = QuantScheme.from_parameter(declaration)
    if scheme is None:
        _draw(values, declaration, seed, path, full_shape, first)
        return
    of_scales, first = name.endswith(SCALES), first or [0] * values.dim()
    slices = tuple((low, low + size) for low, size in zip(first, values.shape, strict=True))
    matrix = scheme.values_of(slices, of_scales=of_scales)
    path = path.removesuffix(SCALES)
    for block in blocks(matrix, scheme.dim, values.device.type):
        block_values = torch.ones([end - low for low, end in block], device=values.device)
        _draw(block_values, declaration, seed, path, declaration.shape, [low for low, _ in block])
        encoding = quantize(block_values, scheme)[of_scales]
        assert encoding is not None
        put(encoding, scheme.codes_of(block, of_scales=of_scales), values.data, first)


def _draw(
    values: Tensor,
    declaration: Parameter,
    seed: int,
    path: str,
    full_shape: Sequence[int] | None,
    first: Sequence[int] | None,
) -> None:
    if declaration.derivation is not None:
        _derive(values, declaration.derivation, seed, path, first)
    elif declaration.log_of is not None:
        low, high = declaration.log_of
        init_uniform_(values, 3**-0.5, seed, path, full_shape, first)  # between -1 and 1
        values.data.add_(1).mul_((high - low) / 2).add_(low).log_()
    elif declaration.std is not None:
        init_uniform_(values, declaration.std, seed, path, full_shape, first)


def _derive(values: Tensor, derivation: Derivation, seed: int, path: str, first: Sequence[int] | None) -> None:
    """Initialize a part of a parameter at `path`, which starts at `first`, from the initial values of its source."""
    source, first = derivation.source, first or [0] * values.dim()
    source_path = f"{path.rpartition('.')[0]}.{source.name.rpartition('.')[2]}"

    dtype = values.dtype if source.form == "full" else torch.float32

    def draw(region: Slices) -> Tensor:
        drawn_values = torch.ones([end - low for low, end in region], dtype=dtype, device=values.device)
        _draw(drawn_values, source, seed, source_path, source.shape, [low for low, _ in region])
        return drawn_values

    values.data.copy_(derived_values(derivation, draw, first, values.shape))


def _declared_in(module: nn.Module) -> dict[str, Parameter]:
    """Declarations of a module's own parameters. Stored in the module, so that its copies have them too."""
    return vars(module).get("declared", {})


def matrix_of(module: nn.Module, name: str) -> Tensor | QuantizedWeight:
    """A module's own matrix by name, plain or quantized."""
    codes: Tensor = getattr(module, name)
    declaration = _declared_in(module).get(name)
    if declaration is None or (scheme := QuantScheme.from_parameter(declaration)) is None:
        return codes
    return QuantizedWeight(codes, getattr(module, name + SCALES, None), scheme)


def quant_schemes_of(model: nn.Module) -> dict[str, QuantScheme]:
    """Quantization of every quantized matrix, by path."""
    return {
        f"{path}.{name}".removeprefix("."): scheme
        for path, module in model.named_modules()
        for name, declaration in _declared_in(module).items()
        if not name.endswith(SCALES) and (scheme := QuantScheme.from_parameter(declaration)) is not None
    }


def _declaration(model: nn.Module, path: str) -> Parameter | None:
    module_path, _, name = path.rpartition(".")
    return _declared_in(model.get_submodule(module_path)).get(name)


def check_splits(model: nn.Module, paths: tuple[str, ...], splits: Splits, layout: Layout) -> Iterator[Problem]:
    """Yield problems with a parameter's splits: they must be those that its declared dimensions require, plus at most
    FSDP's axis of the same mesh."""
    path, declaration = paths[0], _declaration(model, paths[0])
    place, of_experts = f"placements.{path}", declaration is not None and declaration.of_experts
    if model.get_parameter(path).is_meta and declaration is None:
        yield Problem("uninitialized", path, None, "is on the meta device and has no initial values",
                      "declare it, or create the model on a device")  # fmt: skip
    dims = enumerate(declaration.dims) if declaration is not None else ()
    expected_splits = {(OURS.axes[kind], dim) for dim, kind in dims if layout.degree(OURS.axes.get(kind, "")) > 1}
    own_splits = {split for split in splits if split[0] not in FSDP_AXES}
    if own_splits != expected_splits and declaration is None:
        yield Problem("unsupported", f"{place}.splits", sorted(own_splits),
                      "splits a parameter with undeclared dimensions",
                      "split it over fsdp only, or declare it")  # fmt: skip
    elif own_splits != expected_splits:
        yield Problem("mismatch", f"{place}.splits", sorted(own_splits),
                      f"must be {sorted(expected_splits)}, as its module requires",
                      "use these; FSDP's axis may split any dimension")  # fmt: skip
    fsdp = "expert_fsdp" if of_experts else "fsdp"
    if any(axis in FSDP_AXES and axis != fsdp for axis, _ in splits):
        description = "with an expert dimension" if of_experts else "without an expert dimension"
        yield Problem("conflict", f"{place}.splits", list(splits),
                      f"belongs to a parameter {description}, which only the axis {fsdp} may split",
                      f"split it over {fsdp}")  # fmt: skip
    owners = {id(model.get_submodule(parameter_path.rpartition(".")[0])) for parameter_path in paths}
    if of_experts and len(owners) > 1 and fsdp in dict(splits):
        yield Problem("conflict", f"{place}.splits", list(splits),
                      f"must not have {fsdp}, since {paths[1]} is the same parameter",
                      "keep it whole on the ranks of that axis")  # fmt: skip


def place(
    model: nn.Module,
    paths: tuple[str, ...],
    splits: Splits,
    layout: Layout,
    seed: int,
    optimizer_split: tuple[str, int] | None = None,
) -> None:
    """Replace a parameter, in all modules that share it, by this rank's part on the layout's device.

    The part has the values of the whole, or, if that is on the meta device, its declared initial values, keyed by
    (seed, first path, element). Raises SpecError if a degree does not divide a dimension.
    """
    path, full_parameter, declaration = paths[0], model.get_parameter(paths[0]), _declaration(model, paths[0])
    part = ParameterShard(
        full_parameter.shape,
        splits,
        of_experts=declaration is not None and declaration.of_experts,
        shares_tokens=any(_shares_tokens(model, parameter_path.rpartition(".")[0]) for parameter_path in paths),
        is_hidden_matrix=declaration is not None and declaration.is_hidden_matrix,
        optimizer_split=optimizer_split,
    )
    sizes, first = _extent(part, layout, path)
    if full_parameter.is_meta:
        values = torch.ones(sizes, dtype=full_parameter.dtype, device=layout.device)
        if declaration is not None:
            _begin(values, path.rpartition(".")[2], declaration, seed, path, full_parameter.shape, first)
    else:
        values = full_parameter.detach()
        for dim, (start, size) in enumerate(zip(first, sizes, strict=True)):
            values = values.narrow(dim, start, size)
        values = values.to(layout.device, copy=True)
    parameter = nn.Parameter(values, requires_grad=full_parameter.requires_grad)
    parameter.part = part  # type: ignore[attr-defined]
    for parameter_path in paths:
        module_path, _, name = parameter_path.rpartition(".")
        setattr(model.get_submodule(module_path), name, parameter)


def _shares_tokens(model: nn.Module, path: str) -> bool:
    """Whether a module, or one that contains it, has sequence-sharded tokens on tensor-parallel ranks."""
    steps = path.split(".")
    modules = (model.get_submodule(".".join(steps[:depth])) for depth in range(len(steps) + 1))
    return any(isinstance(module, SequenceParallel) for module in modules)


def _extent(part: ParameterShard, layout: Layout, name: str) -> tuple[list[int], list[int]]:
    """(sizes of this rank's part, its start in the whole)."""
    sizes, first = list(part.shape), [0] * len(part.shape)
    for axis, dim in part.splits:
        if sizes[dim] % layout.degree(axis):
            raise spec_error("not_divisible", f"{name}.shape[{dim}]", sizes[dim],
                             f"must be divisible by the {axis} degree (={layout.degree(axis)})",
                             "use another size, or a degree that divides it")  # fmt: skip
        sizes[dim] //= layout.degree(axis)
        first[dim] += layout.index(axis) * sizes[dim]
    return sizes, first


def shard_offsets(part: ParameterShard, layout: Layout) -> list[int]:
    """Start in the whole, by dimension, of what this rank computes with: its part, gathered over FSDP's axes."""
    splits = tuple((axis, dim) for axis, dim in part.splits if axis not in FSDP_AXES)
    return _extent(replace(part, splits=splits), layout, "a parameter")[1]


def extent(part: ParameterShard, layout: Layout) -> tuple[tuple[int, int], ...]:
    """(first, end) in the whole, by dimension, of this rank's part. FSDP's parts may be uneven: as in torch.chunk, the
    last ones may be shorter, or empty. Raises ValueError for a part of a user's module."""
    if part.offsets is not None:
        raise ValueError("a part of a user's module has no axes; its size is that of its tensor")
    bounds = [(0, size) for size in part.shape]
    for axis, dim in part.splits:
        first, end = bounds[dim]
        shard_size = -(-(end - first) // layout.degree(axis))
        begin = min(end, first + layout.index(axis) * shard_size)
        bounds[dim] = begin, min(end, begin + shard_size)
    return tuple(bounds)


@dataclass(frozen=True)
class LocalParameter:
    """A parameter on this rank."""

    name: str
    parameter: nn.Parameter
    """The model's parameter: a plain tensor, or a DTensor if FSDP gathers it for use."""
    local: nn.Parameter
    """The same memory as a plain tensor, which optimizers update."""
    part: ParameterShard


def local_parameters(model: nn.Module) -> list[LocalParameter]:
    """All parameters of a model, once each, in order."""
    parameters = []
    for name, parameter in model.named_parameters():
        local = parameter
        if isinstance(parameter, DTensor):
            dtensor: DTensor = parameter.data  # type: ignore[assignment]
            local = nn.Parameter(dtensor.to_local(), requires_grad=parameter.requires_grad)
        parameters.append(LocalParameter(name, parameter, local, shard_of(parameter)))
    return parameters


def to_global(local: Tensor, part: ParameterShard, layout: Layout) -> Tensor:
    """DTensor of the full tensor, which shares memory with `local`, this rank's part; a plain tensor if it is not
    split. Replicas are not represented: a checkpoint stores one of them."""
    if not part.splits:
        return local.detach()
    mesh = mesh_of(layout, tuple(axis for axis, _ in part.splits), local.device.type)
    return DTensor.from_local(
        local.detach(),
        mesh,
        [Shard(dim) for _, dim in part.splits],
        run_check=False,
        shape=part.shape,
        stride=torch.empty(part.shape, device="meta").stride(),
    )


def shard_of(parameter: Tensor) -> ParameterShard:
    """Part of the whole that a parameter or buffer is: all of it if it was not placed."""
    return getattr(parameter, "part", None) or ParameterShard(parameter.shape)


def split_further(part: ParameterShard, axis: str, dim: int) -> ParameterShard:
    return replace(part, splits=(*part.splits, (axis, dim)))
