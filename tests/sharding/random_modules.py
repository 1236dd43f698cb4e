"""Random modules: each step turns existing tensors into another one."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D = torch.float64
LARGEST = 360
"""Maximum number of elements of a tensor."""
GAP = 1e-6
"""Minimum distance between values whose order matters, and to a kink: there are no ties."""


@dataclass(frozen=True)
class Recipe:
    """The computation of a module."""

    shape: tuple[int, ...]
    """Shape of its input."""
    steps: tuple[tuple[str, int], ...]
    """(name in `STEPS`, seed of its choices)"""

    def module(self) -> "RandomModule":
        return RandomModule(self)

    def sample(self) -> tuple[Tensor]:
        return (torch.randn(self.shape, dtype=D, generator=torch.Generator().manual_seed(1)),)


class RandomModule(nn.Module):
    """Built by its first run; later runs repeat the same steps."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.notes: list[Any] = []
        """Decisions that the first run made by looking at values."""
        with torch.no_grad():
            self._run(_Maker(self, is_building=True), *recipe.sample())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._run(_Maker(self, is_building=False), x)

    def _run(self, maker: "_Maker", x: Tensor) -> tuple[Tensor, ...]:
        tensors = maker.tensors = [x * maker.parameter(*x.shape)]
        for name, seed in self.recipe.steps:
            draw = maker.draw = random.Random(seed)
            operand = tensors[-1] if draw.random() < 0.8 else draw.choice(tensors)
            min_dims, step = STEPS[name]
            result = step(maker, operand) if operand.dim() >= min_dims else None
            if result is None or not 0 < result.numel() <= LARGEST or result.dim() > 5:
                continue
            scale = maker.note(lambda result=result: _scale(result))
            tensors.append(result if scale == 1 else result * scale)
        return tuple(tensors[-2:])


def _scale(result: Tensor) -> float:
    """A power of two that keeps values small, where functions do not amplify rounding."""
    largest = float(result.abs().max())
    return 1.0 if largest < 4 else 2.0 ** -math.ceil(math.log2(largest))


class _Maker:
    """Random choices, and the parameters, buffers and notes of a module in the order in which its steps use them."""

    draw: random.Random
    tensors: list[Tensor]

    def __init__(self, module: RandomModule, is_building: bool) -> None:
        self._module, self._is_building = module, is_building
        self._count = self._noted = 0

    def _next(self, make: Callable[[torch.Generator], Tensor], is_parameter: bool) -> Tensor:
        name = f"t{self._count}"
        if self._is_building:
            value = make(torch.Generator().manual_seed(self._count))
            if is_parameter:
                self._module.register_parameter(name, nn.Parameter(value))
            else:
                self._module.register_buffer(name, value)
        self._count += 1
        tensor: Tensor = getattr(self._module, name)
        return tensor

    def parameter(self, *shape: int) -> Tensor:
        return self._next(lambda g: torch.randn(shape, dtype=D, generator=g), True)

    def index(self, high: int, *shape: int) -> Tensor:
        return self._next(lambda g: torch.randint(high, shape, generator=g), False)

    def distinct(self, high: int, count: int) -> Tensor:
        return self._next(lambda g: torch.randperm(high, generator=g)[:count], False)

    def mask(self, *shape: int) -> Tensor:
        return self._next(lambda g: torch.rand(shape, generator=g) < 0.5, False)

    def note(self, look: Callable[[], Any]) -> Any:
        if self._is_building:
            self._module.notes.append(look())
        self._noted += 1
        return self._module.notes[self._noted - 1]

    def int(self, low: int, high: int) -> int:
        return self.draw.randint(low, high)

    def dim(self, x: Tensor) -> int:
        return self.draw.randrange(x.dim())

    def dims(self, x: Tensor) -> list[int]:
        return sorted(self.draw.sample(range(x.dim()), self.int(1, x.dim())))

    def flag(self) -> bool:
        return self.draw.random() < 0.5

    def divisor(self, size: int) -> int:
        return self.draw.choice([divisor for divisor in range(1, size + 1) if size % divisor == 0])

    def slices(self, x: Tensor, dim: int, index: Any) -> Tensor:
        return x[(*[slice(None)] * dim, index)]


def _are_apart(x: Tensor, dims: list[int]) -> bool:
    """Whether values along some dimensions are all distinct."""
    rows = x.movedim(dims, list(range(len(dims)))).flatten(0, len(dims) - 1)
    sorted_rows = rows.sort(0)[0]
    return bool((sorted_rows[1:] - sorted_rows[:-1] > GAP).all())


def _kink(m: _Maker, x: Tensor) -> Tensor | None:
    if m.note(lambda: bool(x.abs().min() > GAP)):
        return m.draw.choice([torch.relu, torch.abs, F.leaky_relu, lambda x: torch.where(x > 0, x, x * 0.1)])(x)
    return None


def _binary(m: _Maker, x: Tensor) -> Tensor:
    """An operation with another tensor or a parameter, broadcast."""
    operand = m.draw.choice(m.tensors)
    try:
        torch.broadcast_shapes(x.shape, operand.shape)
    except RuntimeError:
        operand = m.parameter(*[m.draw.choice([1, size]) for size in x.shape][m.int(0, x.dim()) :])
    first, second = m.draw.choice([(x, operand), (operand, x)])
    return m.draw.choice([torch.add, torch.sub, torch.mul])(first, second)


def _einsum(m: _Maker, x: Tensor) -> Tensor:
    letters = "abcde"[: x.dim()]
    output_letters, input_letters = ("".join(m.draw.sample(letters, m.int(1, len(letters)))) for _ in range(2))
    weight = m.parameter(*[x.shape[letters.index(letter)] for letter in input_letters], m.int(1, 6))
    return torch.einsum(f"{letters},{input_letters}z->{output_letters}z", x, weight)


def _reshape(m: _Maker, x: Tensor) -> Tensor:
    left, shape = x.numel(), []
    while left > 1 and len(shape) < 3:
        shape.append(m.divisor(left))
        left //= shape[-1]
    return x.reshape(*shape, left)


def _order_step(run: Callable[[_Maker, Tensor, int], Tensor]) -> Callable[[_Maker, Tensor], Tensor | None]:
    """A step along a dimension whose values have an order."""

    def step(m: _Maker, x: Tensor) -> Tensor | None:
        dim = m.dim(x)
        return run(m, x, dim) if m.note(lambda: _are_apart(x, [dim])) else None

    return step


def _extremes(m: _Maker, x: Tensor) -> Tensor | None:
    dims = m.dims(x)
    if m.note(lambda: _are_apart(x, dims)):
        return m.draw.choice([torch.amax, torch.amin])(x, dims, m.flag())
    return None


def _gather(m: _Maker, x: Tensor) -> Tensor:
    dim = m.dim(x)
    shape = [m.int(1, 6) if d == dim else m.int(1, size) for d, size in enumerate(x.shape)]
    return x.gather(dim, m.index(x.shape[dim], *shape))


def _indexed_twice(m: _Maker, x: Tensor) -> Tensor:
    first, second = m.draw.sample(range(x.dim()), 2)
    indices: list[Any] = [slice(None)] * x.dim()
    count = m.int(1, 6)
    indices[first] = m.index(x.shape[first], count)
    indices[second] = m.index(x.shape[second], m.draw.choice([1, count]))
    return x[tuple(indices)]


def _target(m: _Maker, x: Tensor, dim: int, size: int) -> Tensor:
    """Zeros or a parameter, with the shape of `x` except in one dimension."""
    shape = [size if d == dim else other_size for d, other_size in enumerate(x.shape)]
    return torch.zeros(shape, dtype=D) if m.flag() else m.parameter(*shape)


def _scatter_step(run: Callable[[_Maker, Tensor, Tensor, int, int], Tensor]) -> Callable[[_Maker, Tensor], Tensor]:
    """A write along a dimension into a tensor of another size there."""

    def step(m: _Maker, x: Tensor) -> Tensor:
        dim, size = m.dim(x), m.int(1, 6)
        return run(m, _target(m, x, dim, size), x, dim, size)

    return step


def _scatter(m: _Maker, x: Tensor) -> Tensor:
    dim = m.dim(x)
    size = x.shape[dim] + m.int(1, 6)
    index = m.distinct(size, x.shape[dim]).view([-1 if d == dim else 1 for d in range(x.dim())])
    return _target(m, x, dim, size).scatter(dim, index.expand(x.shape), x)


def _index_copy(m: _Maker, x: Tensor) -> Tensor:
    dim = m.dim(x)
    count = m.int(1, x.shape[dim])
    return x.index_copy(dim, m.distinct(x.shape[dim], count), _target(m, x, dim, count))


def _pad(m: _Maker, x: Tensor) -> Tensor:
    dim = m.dim(x)
    around = [m.int(-(x.shape[dim] // 3), 2) for _ in range(2)]
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + around, value=m.draw.choice([0.0, 0.5]))


def _narrow(m: _Maker, x: Tensor) -> Tensor:
    dim = m.dim(x)
    start = m.draw.randrange(x.shape[dim])
    return x.narrow(dim, start, m.int(1, x.shape[dim] - start))


def _cat(m: _Maker, x: Tensor) -> Tensor:
    dim = m.dim(x)
    shape = [m.int(1, 4) if d == dim else size for d, size in enumerate(x.shape)]
    candidates = [y for y in m.tensors if y.dim() == x.dim() and
                  all(d == dim or size == y.shape[d] for d, size in enumerate(x.shape))]  # fmt: skip
    return torch.cat(m.draw.sample([x, m.draw.choice(candidates), m.parameter(*shape)], m.int(2, 3)), dim)


def _layer_norm(m: _Maker, x: Tensor) -> Tensor:
    shape = x.shape[m.dim(x) :]
    weight = m.parameter(*shape) if m.flag() else None
    return F.layer_norm(x, shape, weight, m.parameter(*shape) if weight is not None and m.flag() else None, eps=0.1)


ELEMENTWISE = [torch.tanh, torch.sigmoid, torch.neg, torch.cos, F.silu, lambda x: x * 0.5 + 1, lambda x: 1 - x]
Step = Callable[[_Maker, Tensor], Tensor | None]
STEPS: dict[str, tuple[int, Step]] = {
    "elementwise": (0, lambda m, x: m.draw.choice(ELEMENTWISE)(x)),
    "kinked": (0, _kink),
    "binary": (0, _binary),
    "masked": (0, lambda m, x: torch.where(m.mask(*x.shape[m.int(0, x.dim()) :]), x, torch.cos(x))),
    "outer": (0, lambda m, x: x.unsqueeze(-1) * m.parameter(m.int(1, 6))),
    "matmul": (1, lambda m, x: x @ m.parameter(x.shape[-1], m.int(1, 6))),
    "linear": (1, lambda m, x: F.linear(x, m.parameter(size := m.int(1, 6), x.shape[-1]), m.parameter(size))),
    "gram": (2, lambda m, x: x @ x.transpose(-1, -2)),
    "batched matmul": (3, lambda m, x: torch.matmul(x, m.parameter(*x.shape[:-2], x.shape[-1], m.int(1, 6)))),
    "einsum": (2, _einsum),
    "flatten": (2, lambda m, x: x.flatten(start := m.draw.randrange(x.dim() - 1), start + 1)),
    "unflatten": (1, lambda m, x: x.unflatten(dim := m.dim(x), (m.divisor(x.shape[dim]), -1))),
    "unsqueeze": (0, lambda m, x: x.unsqueeze(m.int(0, x.dim()))),
    "reshape": (0, _reshape),
    "permute": (0, lambda m, x: x.permute(m.draw.sample(range(x.dim()), x.dim()))),
    "sum": (1, lambda m, x: x.sum(m.dims(x), m.flag())),
    "mean": (1, lambda m, x: x.mean(m.dims(x), m.flag())),
    "logsumexp": (1, lambda m, x: x.logsumexp(m.dims(x), m.flag())),
    "total": (0, lambda m, x: x.sum() if m.flag() else x.mean()),
    "variance": (1, lambda m, x: x.var(m.dims(x), correction=0, keepdim=m.flag())),
    "extremes": (1, _extremes),
    "sort": (1, _order_step(lambda m, x, dim: x.sort(dim)[0])),
    "topk": (1, _order_step(lambda m, x, dim: x.topk(m.int(1, x.shape[dim]), dim)[0])),
    "maximum": (1, _order_step(lambda m, x, dim: x.max(dim, keepdim=m.flag())[0])),
    "argsort": (1, _order_step(lambda m, x, dim: x.gather(dim, x.argsort(dim)))),
    "cumsum": (1, lambda m, x: x.cumsum(m.dim(x))),
    "softmax": (1, lambda m, x: m.draw.choice([F.softmax, F.log_softmax])(x, m.dim(x))),
    "layer norm": (1, _layer_norm),
    "index_select": (1, lambda m, x: x.index_select(dim := m.dim(x), m.index(x.shape[dim], m.int(1, 6)))),
    "gather": (1, _gather),
    "embedding": (2, lambda m, x: F.embedding(m.index(x.shape[0], 2, m.int(1, 6)), x) if x.dim() == 2 else None),
    "indexed": (1, lambda m, x: m.slices(x, dim := m.dim(x), m.index(x.shape[dim], 2, m.int(1, 6)))),
    "indexed twice": (2, _indexed_twice),
    "index_add": (1, _scatter_step(lambda m, y, x, dim, size: y.index_add(dim, m.index(size, x.shape[dim]), x))),
    "scatter_add": (1, _scatter_step(lambda m, y, x, dim, size: y.scatter_add(dim, m.index(size, *x.shape), x))),
    "index_put": (1, lambda m, x: _target(m, x, 0, size := m.int(1, 6)).index_put(
        (m.index(size, x.shape[0]),), x, accumulate=True)),
    "index_copy": (1, _index_copy),
    "scatter": (1, _scatter),
    "select": (1, lambda m, x: x.select(dim := m.dim(x), m.draw.randrange(x.shape[dim]))),
    "pad": (1, _pad),
    "flip": (1, lambda m, x: x.flip(m.dims(x))),
    "roll": (1, lambda m, x: x.roll(m.int(-6, 6), m.dim(x))),
    "chunk": (1, lambda m, x: m.draw.choice(x.chunk(m.int(1, 3), m.dim(x)))),
    "slice": (1, lambda m, x: m.slices(x, dim := m.dim(x), slice(m.draw.randrange(x.shape[dim]), None, m.int(1, 3)))),
    "narrow": (1, _narrow),
    "stack": (0, lambda m, x: torch.stack([x, m.parameter(*x.shape)], m.int(0, x.dim()))),
    "cat": (1, _cat),
    "repeat": (1, lambda m, x: x.repeat(m.int(1, 4), *[1] * x.dim())),
    "repeat_interleave": (1, lambda m, x: x.repeat_interleave(m.int(1, 4), m.dim(x))),
    "expand": (0, lambda m, x: x.expand((*m.draw.choice([[], [m.int(1, 4)]]), *(
        m.int(1, 4) if size == 1 else size for size in x.shape)))),
}  # fmt: skip
"""(least number of dimensions, step) by name."""
