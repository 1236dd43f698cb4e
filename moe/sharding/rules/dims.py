"""Dims of tensors in which each dimension is one factor. No torch."""

from collections.abc import Sequence

from moe.sharding.rules.rule import Dims, Factor


def factor_dims(shape: Sequence[int], prefix: str = "d", but: frozenset[int] = frozenset()) -> Dims:
    """One factor for each dimension (`d0`, `d1`), except dimensions in `but` and those of size 1."""
    return tuple((f"{prefix}{dim}",) if size > 1 and dim not in but else () for dim, size in enumerate(shape))


def unsplit(shape: Sequence[int]) -> Dims:
    """Dims of a tensor that is never split."""
    return ((),) * len(shape)


def sizes_of(*tensors: tuple[Dims, Sequence[int]]) -> dict[Factor, int]:
    """Sizes of factors, from pairs of dims and shape."""
    return {factors[0]: size for dims, shape in tensors for factors, size in zip(dims, shape, strict=True) if factors}


def broadcast(dims: Dims, shape: Sequence[int], operand_shape: Sequence[int]) -> Dims:
    """Dims of an operand with shape `operand_shape` that is broadcast to `shape`, which has these dims."""
    missing = len(shape) - len(operand_shape)
    return tuple(dims[missing + dim] if size == shape[missing + dim] else () for dim, size in enumerate(operand_shape))
