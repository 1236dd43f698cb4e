"""Dims of tensors each of whose dimensions is one factor. No torch."""

from collections.abc import Sequence

from moe.sharding.rules.rule import Dims, Factor


def factor_dims(shape: Sequence[int], prefix: str = "d", but: frozenset[int] = frozenset()) -> Dims:
    """A factor for each dimension but some: `d0`, `d1`; those of size 1 have none."""
    return tuple((f"{prefix}{dim}",) if size > 1 and dim not in but else () for dim, size in enumerate(shape))


def unsplit(shape: Sequence[int]) -> Dims:
    """Dims of a tensor that nobody splits."""
    return ((),) * len(shape)


def sizes_of(*tensors: tuple[Dims, Sequence[int]]) -> dict[Factor, int]:
    """Sizes of the factors of tensors, given the shape of each."""
    return {
        factors[0]: size
        for dims, shape in tensors
        for factors, size in zip(dims, shape, strict=True)
        if factors
    }


def broadcast(dims: Dims, shape: Sequence[int], of: Sequence[int]) -> Dims:
    """Dims of an operand that is broadcast to a shape which has these dims."""
    missing = len(shape) - len(of)
    return tuple(dims[missing + dim] if size == shape[missing + dim] else () for dim, size in enumerate(of))
