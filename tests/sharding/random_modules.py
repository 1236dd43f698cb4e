"""Modules made at random: each step takes tensors that are there and gives another one."""

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
"""Elements of any tensor."""
GAP = 1e-6
"""Distance between values whose order matters, and of those from a kink: ties are left out."""


@dataclass(frozen=True)
class Recipe:
    """What a module is made of."""

    shape: tuple[int, ...]
    """Of its input."""
    steps: tuple[tuple[str, int], ...]
    """Kind of each, and the seed of its choices."""

    def module(self) -> "RandomModule":
        return RandomModule(self)

    def sample(self) -> tuple[Tensor]:
        return (torch.randn(self.shape, dtype=D, generator=torch.Generator().manual_seed(1)),)


class RandomModule(nn.Module):
    """Made while it runs for the first time; afterwards it does the same again."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.notes: list[Any] = []
        """What was decided by looking at values."""
        with torch.no_grad():
            self._run(_Tensors(self, making=True), *recipe.sample())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._run(_Tensors(self, making=False), x)

    def _run(self, tensors: "_Tensors", x: Tensor) -> tuple[Tensor, ...]:
        first = tensors.parameter(*x.shape)
        there = [x * first]
        for kind, seed in self.recipe.steps:
            draw = random.Random(seed)
            taken = there[-1] if draw.random() < 0.8 else draw.choice(there)
            made = STEPS[kind](draw, tensors, taken, there)
            if made is None or not 0 < made.numel() <= LARGEST or made.dim() > 5:
                continue
            scale = tensors.note(lambda made=made: _scale(made))
            there.append(made if scale == 1 else made * scale)
        return tuple(there[-2:])


def _scale(made: Tensor) -> float:
    """A power of two that keeps values small, so that functions are not where they amplify rounding."""
    largest = float(made.abs().max())
    return 1.0 if largest < 4 else 2.0 ** -math.ceil(math.log2(largest))


class _Tensors:
    """Parameters, buffers and notes of a module, in the order in which its steps ask for them."""

    def __init__(self, module: RandomModule, making: bool) -> None:
        self._module, self._making = module, making
        self._count = self._noted = 0

    def _given(self, make: Callable[[torch.Generator], Tensor], is_parameter: bool) -> Tensor:
        name = f"t{self._count}"
        if self._making:
            value = make(torch.Generator().manual_seed(self._count))
            if is_parameter:
                self._module.register_parameter(name, nn.Parameter(value))
            else:
                self._module.register_buffer(name, value)
        self._count += 1
        given: Tensor = getattr(self._module, name)
        return given

    def parameter(self, *shape: int) -> Tensor:
        return self._given(lambda g: torch.randn(shape, dtype=D, generator=g), True)

    def index(self, high: int, *shape: int) -> Tensor:
        return self._given(lambda g: torch.randint(high, shape, generator=g), False)

    def distinct(self, high: int, count: int) -> Tensor:
        return self._given(lambda g: torch.randperm(high, generator=g)[:count], False)

    def mask(self, *shape: int) -> Tensor:
        return self._given(lambda g: torch.rand(shape, generator=g) < 0.5, False)

    def note(self, look: Callable[[], Any]) -> Any:
        if self._making:
            self._module.notes.append(look())
        self._noted += 1
        return self._module.notes[self._noted - 1]


Step = Callable[[random.Random, _Tensors, Tensor, list[Tensor]], Tensor | None]


def _dim(draw: random.Random, x: Tensor) -> int:
    return draw.randrange(x.dim())


def _dims(draw: random.Random, x: Tensor) -> list[int]:
    return sorted(draw.sample(range(x.dim()), draw.randint(1, x.dim())))


def elementwise(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor:
    return draw.choice(
        [torch.tanh, torch.sigmoid, torch.neg, torch.cos, F.silu, lambda x: x * 0.5 + 1, lambda x: 1 - x]
    )(x)


def kinked(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor | None:
    if not tensors.note(lambda: bool(x.abs().min() > GAP)):
        return None
    return draw.choice([torch.relu, torch.abs, F.leaky_relu, lambda x: torch.where(x > 0, x, x * 0.1)])(x)


def with_another(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor | None:
    """With a tensor that is there, or a parameter, broadcast against it."""
    other = draw.choice(there)
    try:
        torch.broadcast_shapes(x.shape, other.shape)
    except RuntimeError:
        shape = [draw.choice([1, size]) for size in x.shape][draw.randint(0, x.dim()) :]
        other = tensors.parameter(*shape)
    first, second = draw.choice([(x, other), (other, x)])
    return draw.choice([torch.add, torch.sub, torch.mul])(first, second)


def product(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor | None:
    size = draw.randint(1, 6)
    if x.dim() == 0:
        return x * tensors.parameter(size)
    match draw.randrange(5):
        case 0:
            return x @ tensors.parameter(x.shape[-1], size)
        case 1:
            return F.linear(x, tensors.parameter(size, x.shape[-1]), tensors.parameter(size))
        case 2 if x.dim() >= 2:
            return x @ x.transpose(-1, -2)
        case 3 if x.dim() >= 3:
            return torch.matmul(x, tensors.parameter(*x.shape[:-2], x.shape[-1], size))
        case 4 if x.dim() >= 2:
            letters = "abcde"[: x.dim()]
            kept = "".join(draw.sample(letters, draw.randint(1, len(letters))))
            contracted = draw.sample(letters, draw.randint(1, len(letters)))
            other = tensors.parameter(*[x.shape[letters.index(each)] for each in contracted], size)
            return torch.einsum(f"{letters},{''.join(contracted)}z->{kept}z", x, other)
    return x.unsqueeze(-1) * tensors.parameter(size)


def view(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor:
    match draw.randrange(4):
        case 0 if x.dim() >= 2:
            at = draw.randrange(x.dim() - 1)
            return x.flatten(at, at + 1)
        case 1 if x.dim() >= 1:
            dim = _dim(draw, x)
            size = draw.choice([each for each in range(1, x.shape[dim] + 1) if x.shape[dim] % each == 0])
            return x.unflatten(dim, (size, x.shape[dim] // size))
        case 2:
            return x.unsqueeze(draw.randint(0, x.dim()))
    left, shape = x.numel(), []
    while left > 1 and len(shape) < 3:
        size = draw.choice([each for each in range(1, left + 1) if left % each == 0])
        shape.append(size)
        left //= size
    return x.reshape(*shape, left)


def transpose(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor:
    return x.permute(draw.sample(range(x.dim()), x.dim()))


def reduction(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor | None:
    if x.dim() == 0:
        return None
    dims, keep = _dims(draw, x), draw.random() < 0.5
    match draw.randrange(7):
        case 0:
            return x.mean(dims, keep)
        case 1:
            return x.logsumexp(dims, keep)
        case 2:
            return x.sum() if draw.random() < 0.5 else x.mean()
        case 3 if math.prod(x.shape[dim] for dim in dims) > 1:
            return x.var(dims, correction=0, keepdim=keep)
        case 4 if tensors.note(lambda: _apart(x, dims)):
            return draw.choice([torch.amax, torch.amin])(x, dims, keep)
    return x.sum(dims, keep)


def _apart(x: Tensor, dims: list[int]) -> bool:
    """Whether values along some dimensions are all apart from each other."""
    rows = x.movedim(dims, list(range(len(dims)))).flatten(0, len(dims) - 1) if dims else x[None]
    ordered = rows.sort(0)[0]
    return bool((ordered[1:] - ordered[:-1] > GAP).all())


def ordered(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor | None:
    if x.dim() == 0:
        return None
    dim = _dim(draw, x)
    if not tensors.note(lambda: _apart(x, [dim])):
        return None
    match draw.randrange(4):
        case 0:
            return x.sort(dim)[0]
        case 1:
            return x.topk(draw.randint(1, x.shape[dim]), dim)[0]
        case 2:
            return x.max(dim, keepdim=draw.random() < 0.5)[0]
    return x.gather(dim, x.argsort(dim))


def scan(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor | None:
    return x.cumsum(_dim(draw, x)) if x.dim() else None


def gather(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor | None:
    if x.dim() == 0:
        return None
    dim, count = _dim(draw, x), draw.randint(1, 6)
    match draw.randrange(5):
        case 0:
            return x.index_select(dim, tensors.index(x.shape[dim], count))
        case 1:
            shape = [count if at == dim else draw.randint(1, size) if draw.random() < 0.3 else size
                     for at, size in enumerate(x.shape)]  # fmt: skip
            return x.gather(dim, tensors.index(x.shape[dim], *shape))
        case 2:
            return F.embedding(tensors.index(x.shape[0], 2, count), x) if x.dim() == 2 else None
        case 3 if x.dim() >= 2:
            other = draw.choice([each for each in range(x.dim()) if each != dim])
            indices: list[Any] = [slice(None)] * x.dim()
            indices[dim] = tensors.index(x.shape[dim], count)
            indices[other] = tensors.index(x.shape[other], draw.choice([1, count]))
            return x[tuple(indices)]
    return x[(*[slice(None)] * dim, tensors.index(x.shape[dim], 2, count))]


def scatter(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor | None:
    if x.dim() == 0:
        return None
    dim = _dim(draw, x)
    size = draw.randint(1, 6)
    shape = [size if at == dim else each for at, each in enumerate(x.shape)]
    into = draw.choice([torch.zeros(shape, dtype=D), tensors.parameter(*shape)])
    match draw.randrange(5):
        case 0:
            return into.index_add(dim, tensors.index(size, x.shape[dim]), x)
        case 1:
            return into.scatter_add(dim, tensors.index(size, *x.shape), x)
        case 2:
            index = tensors.index(size, x.shape[dim])
            return into.index_put((*[None] * dim, index), x, accumulate=True) if dim == 0 else None
        case 3 if size <= x.shape[dim]:
            return x.index_copy(dim, tensors.distinct(x.shape[dim], size), into)
    many = size + x.shape[dim]
    shape[dim] = many
    index = tensors.distinct(many, x.shape[dim]).view([-1 if at == dim else 1 for at in range(x.dim())])
    return torch.zeros(shape, dtype=D).scatter(dim, index.expand(x.shape), x)


def window(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor | None:
    """A part of a tensor, or with something at its borders."""
    if x.dim() == 0:
        return None
    dim = _dim(draw, x)
    size = x.shape[dim]
    match draw.randrange(7):
        case 0:
            return x.select(dim, draw.randrange(size))
        case 1:
            around = [draw.randint(-(size // 3), 2), draw.randint(-(size // 3), 2)]
            return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + around, value=draw.choice([0.0, 0.5]))
        case 2:
            return x.flip(_dims(draw, x))
        case 3:
            return x.roll(draw.randint(-size, size), dim)
        case 4:
            return draw.choice(x.chunk(draw.randint(1, 3), dim))
        case 5:
            return x[(*[slice(None)] * dim, slice(draw.randrange(size), None, draw.randint(1, 3)))]
    first = draw.randrange(size)
    return x.narrow(dim, first, draw.randint(1, size - first))


def concatenation(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor | None:
    if x.dim() == 0:
        return torch.stack([x, draw.choice(there).sum()])
    dim = _dim(draw, x)
    around = [size for at, size in enumerate(x.shape) if at != dim]
    alike = [
        each
        for each in there
        if each.dim() == x.dim() and [size for at, size in enumerate(each.shape) if at != dim] == around
    ]
    shape = [draw.randint(1, 4) if at == dim else size for at, size in enumerate(x.shape)]
    others = [draw.choice(alike), tensors.parameter(*shape)]
    if draw.random() < 0.2:
        return torch.stack([x, tensors.parameter(*x.shape)], draw.randint(0, x.dim()))
    return torch.cat(draw.sample([x, *others], draw.randint(2, 3)), dim)


def broadcast(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor:
    count = draw.randint(1, 4)
    if x.dim() and draw.random() < 0.3:
        return x.repeat_interleave(count, _dim(draw, x)) if draw.random() < 0.5 else x.repeat(count, *[1] * x.dim())
    wider = [count if size == 1 else size for size in x.shape]
    return x.expand((*draw.choice([[], [count], [1]]), *wider))


def softmax(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor | None:
    return draw.choice([F.softmax, F.log_softmax])(x, _dim(draw, x)) if x.dim() else None


def layer_norm(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor | None:
    if x.dim() == 0:
        return None
    shape = x.shape[draw.randrange(x.dim()) :]
    weight = draw.choice([None, tensors.parameter(*shape)])
    bias = tensors.parameter(*shape) if weight is not None and draw.random() < 0.7 else None
    return F.layer_norm(x, shape, weight, bias, eps=0.1)


def masked(draw: random.Random, tensors: _Tensors, x: Tensor, there: list[Tensor]) -> Tensor:
    mask = tensors.mask(*x.shape[draw.randint(0, x.dim()) :])
    return torch.where(mask, x, draw.choice([torch.cos(x), torch.zeros((), dtype=D)]))


STEPS: dict[str, Step] = {
    each.__name__: each
    for each in (
        elementwise, kinked, with_another, product, view, transpose, reduction, ordered, scan, gather, scatter, window,
        concatenation, broadcast, softmax, layer_norm, masked,
    )
}  # fmt: skip
