"""Placements of parameters: shape, and the mesh axes that split its dimensions."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pydantic import model_validator

from moe.plan.degrees import ShardCounts
from moe.plan.profile import OURS, Axes, Axis
from moe.spec import ModelSpec, Problem, SpecError, spec_error
from moe.spec.base import Count, CountOrZero, Spec, Text
from moe.spec.form import ITEM_BYTES, stored_tensors
from moe.spec.parameter import Parameter
from moe.spec.patterns import layer_pattern

FSDP_AXES = ("fsdp", "expert_fsdp")


class Placement(Spec):
    """Sharding of a parameter, the same in all identical layers."""

    parameter: Text
    """Path in the model; `*` is any layer number, and a number takes precedence over it."""
    shape: tuple[Count, ...]
    splits: tuple[tuple[Axis, CountOrZero], ...] = ()
    """(mesh axis, dimension) pairs in order. The FSDP axes split the state that the plan's `sharding` names. Any
    other axis replicates."""
    blocks: tuple[Text, ...] = ()
    """Kinds of blocks that contain it."""

    @model_validator(mode="after")
    def _check_splits(self) -> "Placement":
        axes = [axis for axis, _ in self.splits]
        place = f"{self.parameter}.splits"
        problems = [
            Problem(
                "out_of_range", place, dim, f"must be a dimension of the shape (={list(self.shape)})", "count from 0"
            )
            for _, dim in self.splits
            if dim >= len(self.shape)
        ]
        if len(set(axes)) < len(axes):
            problems.append(Problem("duplicate", place, axes, "names an axis twice", "split one dimension over each"))
        if len({axis.startswith("expert") for axis in axes}) > 1:
            problems.append(
                Problem("conflict", place, axes, "mixes axes of two meshes", "use the expert axes, or the others")
            )
        if any(axis in FSDP_AXES for axis in axes[:-1]):
            problems.append(Problem("conflict", place, axes, "splits dimensions that FSDP has already sharded",
                                    "put FSDP's axis last"))  # fmt: skip
        if problems:
            raise SpecError(problems)
        return self

    def effective_splits(self, degrees: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """Return the splits over more than one rank."""
        return tuple((axis, dim) for axis, dim in self.splits if degrees.get(axis, 1) > 1)


class Placements:
    """All placements of a model, by path and shape."""

    def __init__(self, placements: Iterable[Placement]) -> None:
        self._by_parameter: dict[tuple[str, tuple[int, ...]], Placement] = {}
        self._unused_keys: set[tuple[str, tuple[int, ...]]] = set()
        for placement in placements:
            if (key := (placement.parameter, placement.shape)) in self._by_parameter:
                raise spec_error("duplicate", "placements", placement.parameter,
                                 f"occurs twice in shape {list(placement.shape)}", "remove one of them")  # fmt: skip
            self._by_parameter[key] = placement
            self._unused_keys.add(key)

    def placement(self, path: str, shape: Sequence[int]) -> Placement:
        """Placement of one parameter. Raises SpecError if there is none."""
        for key in ((path, tuple(shape)), (layer_pattern(path), tuple(shape))):
            if (placement := self._by_parameter.get(key)) is not None:
                self._unused_keys.discard(key)
                return placement
        raise spec_error("missing", "placements", path, f"has no placement in shape {list(shape)}",
                         "add a placement of this parameter and shape")  # fmt: skip

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise SpecError unless each parameter of a whole model, shapes by path, has a placement, and the reverse."""
        for path, shape in shapes.items():
            self.placement(path, shape)
        self.check_used()

    def check_used(self) -> None:
        """Raise SpecError for placements of no parameter."""
        problems = [
            Problem(
                "not_found",
                "placements",
                name,
                f"is not a parameter of the model in shape {list(shape)}",
                "remove it, or correct its path or shape",
            )
            for name, shape in sorted(self._unused_keys)
        ]
        if problems:
            raise SpecError(problems)


@dataclass(frozen=True)
class Weight:
    """Parameter tensor as the planner counts it."""

    name: str
    shape: tuple[int, ...]
    axis_dims: tuple[tuple[Axis, int], ...] = ()
    """(mesh axis, dimension) pairs, without FSDP's."""
    of_experts: bool = False
    """Whether the first dimension is the expert dimension."""
    is_trained: bool = True
    is_hidden_matrix: bool = False
    """Whether Muon updates it."""
    item_bytes: int | None = None
    """Bytes per element of quantized weights and scales; None for weights in the job's dtype."""
    num_coded: int = 0
    """Elements of the matrix that this quantized weight encodes."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_weights(self) -> int:
        """Number of model parameters that it represents."""
        return self.numel if self.item_bytes is None else self.num_coded

    def product_numel(self, shards: ShardCounts) -> int:
        """Elements of the rank's shard at use, dequantized."""
        return prod(self.unsharded_shape(shards)) if self.item_bytes is None else self.dequantized_numel(shards)

    def dequantized_numel(self, shards: ShardCounts) -> int:
        """Elements of the rank's dequantized shard; 0 if not quantized."""
        return self.num_coded * prod(self.unsharded_shape(shards)) // self.numel

    def unsharded_shape(self, shards: ShardCounts) -> tuple[int, ...]:
        """Shape on a rank at use, gathered from FSDP."""
        return _local_shape(self.shape, self.axis_dims, shards)

    def local_shape(self, shards: ShardCounts) -> tuple[int, ...]:
        """Shape on the fullest rank between uses."""
        return _local_shape(self.shape, self.splits(shards), shards)

    def splits(self, shards: ShardCounts) -> tuple[tuple[Axis, int], ...]:
        """(axis, dimension) pairs of axes with several ranks. The only place that chooses FSDP's dimension: the
        first of the outer two that the degree divides, else the first."""
        shape, axis = self.unsharded_shape(shards), "expert_fsdp" if self.of_experts else "fsdp"
        degree: int = getattr(shards, axis)
        outermost = 1 if shape[0] % degree and len(shape) > 1 and shape[1] % degree == 0 else 0
        pairs: tuple[tuple[Any, int], ...] = (*self.axis_dims, (axis, outermost))
        return tuple((axis, dim) for axis, dim in pairs if getattr(shards, axis) > 1)


def _local_shape(shape: tuple[int, ...], splits: tuple[tuple[Axis, int], ...], shards: ShardCounts) -> tuple[int, ...]:
    sizes = list(shape)
    for axis, dim in splits:
        sizes[dim] = -(-sizes[dim] // getattr(shards, axis))
    return tuple(sizes)


def weights_of(parameters: Iterable[Parameter], axes: Axes, frozen: Collection[str] = ()) -> tuple[Weight, ...]:
    """Tensors that parameters are stored as, split over mesh axes; names in `frozen` are not trained."""
    return tuple(
        Weight(
            tensor.name,
            tensor.shape,
            tuple((axes[dim], index) for index, dim in enumerate(tensor.dims) if dim in axes),
            tensor.of_experts,
            not tensor.frozen and tensor.name not in frozen,
            tensor.is_hidden_matrix,
            ITEM_BYTES[dtype] if dtype else None,
            parameter.numel if dtype and tensor.name == parameter.name else 0,
        )
        for parameter in parameters
        for tensor, dtype in stored_tensors(parameter)
    )


def build_placements(
    parameters: Iterable[Parameter], shards: ShardCounts, axes: Axes = OURS.axes
) -> tuple[Placement, ...]:
    """Placements of a table of parameters."""
    return tuple(
        Placement(parameter=weight.name, shape=weight.shape, splits=weight.splits(shards))
        for weight in weights_of(parameters, axes)
    )


def placements_of(model: ModelSpec, shards: ShardCounts, axes: Axes = OURS.axes) -> tuple[Placement, ...]:
    """Placements of a model's parameters, for a new plan or an old one without placements."""
    blocks: dict[tuple[str, Weight], list[str]] = {}
    distinct_blocks = {(layer_pattern(path), block): None for path, block in model.blocks()}
    for path, block in distinct_blocks:
        for weight in weights_of(block.parameters, axes):
            blocks.setdefault((f"{path}.{weight.name}" if path else weight.name, weight), []).append(block.kind)
    return tuple(
        Placement(parameter=path, shape=weight.shape, splits=weight.splits(shards), blocks=tuple(kinds))
        for (path, weight), kinds in blocks.items()
    )
