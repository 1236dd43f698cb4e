"""One parameter: its shape, how a layout cuts it up, and what the fullest rank then holds of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from moe.plan.degrees import Shards
from moe.plan.profile import OURS, Axes
from moe.spec.parameter import Parameter


@dataclass(frozen=True)
class Weight:
    """One parameter."""

    name: str
    """Within its unit."""
    shape: tuple[int, ...]
    cuts: tuple[tuple[str, int], ...] = ()
    """(mesh axis, dimension divided by its degree); FSDP cuts once more."""
    of_experts: bool = False
    """Whether the first dimension counts experts."""
    std: float | None = None
    """As in the table: of its initial values."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def used(self, shards: Shards) -> tuple[int, ...]:
        """Its shape on a rank when it is used, gathered from FSDP."""
        sizes = list(self.shape)
        for axis, dim in self.cuts:
            sizes[dim] = -(-sizes[dim] // getattr(shards, axis))
        return tuple(sizes)

    def held(self, shards: Shards) -> tuple[int, ...]:
        """Its shape on the fullest rank between uses."""
        used, degree = self.used(shards), shards.expert_fsdp if self.of_experts else shards.fsdp
        sizes, dim = list(used), fsdp_dim(used, degree)
        sizes[dim] = -(-sizes[dim] // degree)
        return tuple(sizes)


def weights_of(parameters: Iterable[Parameter], axes: Axes = OURS.axes) -> tuple[Weight, ...]:
    """Parameters of a table, their dimensions split over mesh axes."""
    return tuple(
        Weight(
            each.name,
            each.shape,
            tuple((axes[dim], at) for at, dim in enumerate(each.dims) if dim in axes),
            each.of_experts,
            each.std,
        )
        for each in parameters
    )


def fsdp_dim(shape: tuple[int, ...], degree: int) -> int:
    """The dimension that FSDP cuts up: the first of the two outermost that comes out even, else the first."""
    return 1 if shape[0] % degree and len(shape) > 1 and shape[1] % degree == 0 else 0
