"""Placements of parameters: the shape of each, and the mesh axis that splits each of its dimensions."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pydantic import model_validator

from moe.plan.degrees import ShardCounts
from moe.plan.profile import OURS, Axes, Axis
from moe.spec import ModelSpec, Problem, SpecError
from moe.spec.base import Count, CountOrZero, Spec, Text
from moe.spec.form import ITEM_BYTES, kept
from moe.spec.parameter import Parameter
from moe.spec.patterns import starred

FSDP_AXES = ("fsdp", "expert_fsdp")


class Placement(Spec):
    """Split of a parameter, the same in all layers that are alike."""

    parameter: Text
    """Path in the model. `*` stands for the number of any layer; a placement with a layer's own number takes
    precedence."""
    shape: tuple[Count, ...]
    """Shape of the whole parameter."""
    splits: tuple[tuple[Axis, CountOrZero], ...] = ()
    """Mesh axes and the dimension that each of them splits, one after another. Over `fsdp` and `expert_fsdp` that is
    split which the plan's `sharding` names. What no axis splits lies whole on all ranks of its mesh."""
    blocks: tuple[Text, ...] = ()
    """Kinds of blocks that have it."""

    @model_validator(mode="after")
    def _possible(self) -> "Placement":
        axes = [axis for axis, _ in self.splits]
        place = f"{self.parameter}.splits"
        problems = [
            Problem(
                "out_of_range",
                place,
                dim,
                f"must be a dimension of the shape (={list(self.shape)})",
                "count from 0",
            )
            for _, dim in self.splits
            if dim >= len(self.shape)
        ]
        if len(set(axes)) < len(axes):
            problems.append(
                Problem("duplicate", place, axes, "names an axis twice", "split one dimension over each")
            )
        if len({axis.startswith("expert") for axis in axes}) > 1:
            problems.append(
                Problem(
                    "conflict", place, axes, "are axes of two meshes", "use those of experts, or the others"
                )
            )
        if any(axis in FSDP_AXES for axis in axes[:-1]):
            problems.append(
                Problem("conflict", place, axes, "split what FSDP has cut up", "put FSDP's axis last")
            )
        if problems:
            raise SpecError(problems)
        return self

    def over(self, degrees: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """Splits over more than one rank."""
        return tuple((axis, dim) for axis, dim in self.splits if degrees.get(axis, 1) > 1)


class Placements:
    """The placements of all parameters of a model, found by path and shape."""

    def __init__(self, placements: Iterable[Placement]) -> None:
        self._of: dict[tuple[str, tuple[int, ...]], Placement] = {}
        self._unused_keys: set[tuple[str, tuple[int, ...]]] = set()
        for placement in placements:
            if (key := (placement.parameter, placement.shape)) in self._of:
                raise SpecError(
                    Problem(
                        "duplicate",
                        "placements",
                        placement.parameter,
                        f"is there twice in shape {list(placement.shape)}",
                        "remove one of them",
                    )
                )
            self._of[key] = placement
            self._unused_keys.add(key)

    def placement(self, path: str, shape: Sequence[int]) -> Placement:
        """Placement of one parameter. Raises SpecError if there is none."""
        for key in ((path, tuple(shape)), (starred(path), tuple(shape))):
            if (placement := self._of.get(key)) is not None:
                self._unused_keys.discard(key)
                return placement
        raise SpecError(Problem("missing", "placements", path, f"is placed nowhere in shape {list(shape)}",
                                "add a placement of that parameter and shape"))  # fmt: skip

    def check_used(self) -> None:
        """Raises SpecError for placements that were asked for by no parameter."""
        problems = [
            Problem(
                "not_found",
                "placements",
                name,
                f"is no parameter of the model in shape {list(shape)}",
                "remove it, or correct its path or shape",
            )
            for name, shape in sorted(self._unused_keys)
        ]
        if problems:
            raise SpecError(problems)


@dataclass(frozen=True)
class Weight:
    """One parameter as the planner counts it."""

    name: str
    """Name within the unit."""
    shape: tuple[int, ...]
    axis_dims: tuple[tuple[Axis, int], ...] = ()
    """(mesh axis, dimension divided by its degree); FSDP cuts once more."""
    of_experts: bool = False
    """Whether the first dimension counts experts."""
    is_trained: bool = True
    """Whether it has a gradient, and an optimizer remembers anything of it."""
    item_bytes: int | None = None
    """Bytes of an element of codes or of their scales; None for other weights."""
    num_coded: int = 0
    """Numbers of the matrix that it is the codes of."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_weights(self) -> int:
        """Number of the model's weights that it stands for."""
        return self.numel if self.item_bytes is None else self.num_coded

    def product_numel(self, shards: ShardCounts) -> int:
        """Numbers of the matrix on a rank when it is multiplied."""
        return (
            prod(self.unsharded_shape(shards)) if self.item_bytes is None else self.dequantized_numel(shards)
        )

    def dequantized_numel(self, shards: ShardCounts) -> int:
        """Numbers of the matrix on a rank when codes are decoded to be multiplied; 0 of all else."""
        return self.num_coded * prod(self.unsharded_shape(shards)) // self.numel

    def unsharded_shape(self, shards: ShardCounts) -> tuple[int, ...]:
        """Shape on a rank while the weight is used: gathered over FSDP ranks, still split over other axes."""
        return _local_shape(self.shape, self.axis_dims, shards)

    def local_shape(self, shards: ShardCounts) -> tuple[int, ...]:
        """Shape on the fullest rank between uses, when it is sharded over FSDP ranks too."""
        return _local_shape(self.shape, self.splits(shards), shards)

    def splits(self, shards: ShardCounts) -> tuple[tuple[Axis, int], ...]:
        """Axes of more than one rank and the dimensions that they split: the one place that chooses FSDP's, which is
        the first of the two outermost that comes out even, else the first."""
        shape, axis = self.unsharded_shape(shards), "expert_fsdp" if self.of_experts else "fsdp"
        degree: int = getattr(shards, axis)
        outermost = 1 if shape[0] % degree and len(shape) > 1 and shape[1] % degree == 0 else 0
        pairs: tuple[tuple[Any, int], ...] = (*self.axis_dims, (axis, outermost))
        return tuple((axis, dim) for axis, dim in pairs if getattr(shards, axis) > 1)


def _local_shape(
    shape: tuple[int, ...], splits: tuple[tuple[Axis, int], ...], shards: ShardCounts
) -> tuple[int, ...]:
    sizes = list(shape)
    for axis, dim in splits:
        sizes[dim] = -(-sizes[dim] // getattr(shards, axis))
    return tuple(sizes)


def weights_of(
    parameters: Iterable[Parameter], axes: Axes, frozen: Collection[str] = ()
) -> tuple[Weight, ...]:
    """Parameters of a table as they are kept, their dimensions split over mesh axes; those of these names are not
    trained."""
    return tuple(
        Weight(
            tensor.name,
            tensor.shape,
            tuple((axes[dim], at) for at, dim in enumerate(tensor.dims) if dim in axes),
            tensor.of_experts,
            not tensor.frozen and tensor.name not in frozen,
            ITEM_BYTES[dtype] if dtype else None,
            parameter.numel if dtype and tensor.name == parameter.name else 0,
        )
        for parameter in parameters
        for tensor, dtype in kept(parameter)
    )


def placed(
    parameters: Iterable[Parameter], shards: ShardCounts, axes: Axes = OURS.axes
) -> tuple[Placement, ...]:
    """Placements of the parameters of a table."""
    return tuple(
        Placement(parameter=weight.name, shape=weight.shape, splits=weight.splits(shards))
        for weight in weights_of(parameters, axes)
    )


def placements_of(model: ModelSpec, shards: ShardCounts, axes: Axes = OURS.axes) -> tuple[Placement, ...]:
    """Placements of a model's parameters: those of a planner's plan, and of a plan that an earlier release has made,
    which names none."""
    blocks: dict[tuple[str, Weight], list[str]] = {}
    distinct_blocks = {(starred(path), block): None for path, block in model.blocks()}
    for path, block in distinct_blocks:
        for weight in weights_of(block.parameters, axes):
            blocks.setdefault((f"{path}.{weight.name}" if path else weight.name, weight), []).append(
                block.kind
            )
    return tuple(
        Placement(parameter=path, shape=weight.shape, splits=weight.splits(shards), blocks=tuple(kinds))
        for (path, weight), kinds in blocks.items()
    )
