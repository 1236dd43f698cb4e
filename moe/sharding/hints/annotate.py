"""Annotations inside a module's forward pass, which change nothing on one device (GShard, arXiv 2006.16668, section
3.2): `split`, `replicate` and `shard`."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe.sharding.hints.hints import Hint, Replicate, Shard, Split, hint_from_plain, hint_to_plain
from moe.sharding.lines import line_of
from moe.spec import SpecError, spec_error

_CAPTURING: ContextVar[bool] = ContextVar("capturing", default=False)


def is_capturing() -> bool:
    """Whether a module is being captured; otherwise annotations return their tensor unchanged."""
    return _CAPTURING.get()


@contextmanager
def capturing() -> Iterator[None]:
    token = _CAPTURING.set(True)
    try:
        yield
    finally:
        _CAPTURING.reset(token)


@torch.library.custom_op("shardyard::placed", mutates_args=())
def placed(x: Tensor, hint: str) -> Tensor:
    """The same tensor, placed as the hint says."""
    return x.clone()


@placed.register_fake
def _(x: Tensor, hint: str) -> Tensor:
    return torch.empty_like(x)


def _keep_hint(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.hint = inputs[1]


def _place_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.ops.shardyard.placed(gradient, ctx.hint), None


placed.register_autograd(_place_gradient, setup_context=_keep_hint)
PLACED = torch.ops.shardyard.placed.default


def hint_of(text: str) -> Hint:
    return hint_from_plain(json.loads(text))


def _annotate(x: Tensor, hint: Hint) -> Tensor:
    if not is_capturing():
        return x
    return torch.ops.shardyard.placed(x, json.dumps(hint_to_plain(hint)))


def _hint(make: Callable[..., Hint], *arguments: Any) -> Hint:
    """A hint that an annotation makes. Raises SpecError with the user's line."""
    try:
        return make(*arguments)
    except SpecError as error:
        line = line_of(sys._getframe(1))
        raise SpecError([replace(problem, path=f"{line} ({problem.path})") for problem in error.problems]) from None


def split(x: Tensor, dim: int, axis: str | None = None) -> Tensor:
    """`x`, split along a dimension over all devices, or over one mesh axis; its gradient likewise. Raises SpecError for
    an axis that is not a name, such as the number of partitions that the paper's annotation takes."""
    if axis is not None and not isinstance(axis, str):
        line = line_of(sys._getframe(1)) or "sharding.split"
        rule = "is the third argument of sharding.split and must be the name of a mesh axis"
        remedy = "omit it, or use axis='data'; the plan decides the number of parts"
        raise spec_error("wrong_type", line, axis, rule, remedy)
    return _annotate(x, _hint(Split, dim, axis))


def replicate(x: Tensor) -> Tensor:
    """`x`, replicated on every device; its gradient likewise."""
    return _annotate(x, Replicate())


def shard(x: Tensor, dims: Mapping[str, int] | Sequence[Any]) -> Tensor:
    """`x`, split along dimensions over mesh axes (`{"data": 0, "expert": 1}`), or over devices by the paper's array of
    device ids, which has as many dimensions as `x`; its gradient likewise."""
    if isinstance(dims, Mapping):
        return _annotate(x, _hint(Shard, dict(dims)))
    return _annotate(x, _hint(hint_from_plain, {"devices": np.asarray(dims).tolist()}, "sharding.shard"))
