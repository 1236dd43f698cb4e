"""Buffers beside a parameter, kept from step to step: a copy as narrow as the arithmetic, and room for its gradient.

Fresh memory is expensive on a CPU: the system gives it page by page, and takes blocks of many megabytes back at once.
Neither is state: checkpoints have parameters alone. Whoever changes parameters gives them their buffers and says that
values have changed: fused optimizers do not even count up a tensor's version.
"""

from typing import Any

import torch
from torch import Tensor, nn

from moe.parallel.mesh import Layout
from moe.parallel.parameters import LocalParameter


class Buffers:
    """Of one parameter. `keeps_narrow`: whether its narrow copy stays."""

    def __init__(self, *, keeps_narrow: bool) -> None:
        self._keeps_narrow = keeps_narrow
        self._narrow: Tensor | None = None
        self._version: int | None = None
        self._room: Tensor | None = None

    @property
    def narrow_bytes(self) -> int:
        """Of its narrow copy, where there is one."""
        return 0 if self._narrow is None else self._narrow.nbytes

    def narrow(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of `parameter` in `dtype`: made again only where they have changed since."""
        if not self._keeps_narrow:
            return parameter.detach().to(dtype)
        if self._narrow is None or self._narrow.dtype != dtype:
            self._narrow, self._version = torch.empty_like(parameter, dtype=dtype, requires_grad=False), None
        if self._version != parameter._version:
            with torch.no_grad():
                self._narrow.copy_(parameter)
            self._version = parameter._version
        return self._narrow

    def values_changed(self) -> None:
        """Make the narrow copy again when it is wanted."""
        self._version = None

    def take_buffer(self, parameter: Tensor) -> Tensor:
        """Memory for a gradient, any values in it: an earlier one's, where there is one."""
        room, self._room = self._room, None
        return torch.empty_like(parameter, requires_grad=False) if room is None else room

    def return_buffer(self, gradient: Tensor | None) -> None:
        """Write the next gradient where this one lies, if there is one."""
        if gradient is not None:
            self._room = gradient.detach()


def keep_buffers(parameters: list[LocalParameter], layout: Layout) -> None:
    """Give each parameter buffers; from now on `values_changed` has to be told of every update, and gradients are taken
    by `backward` alone, which adds those of a later micro-batch where the first one's lie.

    What FSDP gathers gets none, since it is gone after each use; nor do parts of a user's module, which knows of none.
    Where whole blocks are computed again, memory is scarce, and no narrow copies are kept.
    """
    for local_parameter in parameters:
        if local_parameter.local is local_parameter.parameter and local_parameter.part.offsets is None:
            local_parameter.parameter.beside = Buffers(keeps_narrow=layout.recompute != "full")  # type: ignore[attr-defined]


def values_changed(parameters: list[LocalParameter]) -> None:
    """Say that an optimizer has written into the parameters."""
    for local_parameter in parameters:
        if (beside := buffers_of(local_parameter.parameter)) is not None:
            beside.values_changed()


def buffers_of(parameter: Tensor) -> Buffers | None:
    """Those that `keep_buffers` gave it."""
    return getattr(parameter, "beside", None)


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`. `Tensor.to` takes 2.5 us to find that there is nothing to do, and a token's pass has hundreds of
    such places."""
    return x if x.dtype == dtype else x.to(dtype)


def narrow(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of `parameter` in `dtype`, without a gradient."""
    if parameter.dtype == dtype:
        return parameter.detach()
    beside = buffers_of(parameter)
    return parameter.detach().to(dtype) if beside is None else beside.narrow(parameter, dtype)


def narrowed(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """`parameter` in `dtype`, differentiable."""
    if parameter.dtype == dtype:
        return parameter
    return parameter.to(dtype) if buffers_of(parameter) is None else _CastParameter.apply(parameter, dtype)


class GradBuffer:
    """Buffer that a parameter's gradient is written to; `of_several` parts are added up, in float32 at least."""

    def __init__(self, parameter: Tensor, *, of_several: bool = False) -> None:
        beside, self._dtype = buffers_of(parameter), parameter.dtype
        self._in_place = beside is not None and parameter.grad is not None
        self.adds = self._in_place
        """Whether what comes is added to what lies there."""
        self.into: Tensor | None = None
        """None where no memory is kept for it: then it is what comes first."""
        wide = torch.promote_types(parameter.dtype, torch.float32) if of_several else parameter.dtype
        if self._in_place:
            self.into = parameter.grad
        elif beside is not None and wide == parameter.dtype:
            self.into = beside.take_buffer(parameter)
        elif of_several:
            self.into = torch.empty_like(parameter, dtype=wide, requires_grad=False)

    def write(self, gradient: Tensor) -> None:
        """Put `gradient` here, or add it to what lies here."""
        if self.into is None:
            self.note(gradient)
        else:
            self.note(self.into.add_(gradient) if self.adds else self.into.copy_(gradient))

    def note(self, gradient: Tensor) -> None:
        """This is what lies here now."""
        self.into, self.adds = gradient, True

    def give(self) -> Tensor | None:
        """The gradient for autograd; one that nobody else refers to becomes `grad` as it is."""
        gradient, self.into = self.into, None
        return None if self._in_place or gradient is None else gradient.to(self._dtype)


class _CastParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        ctx.parameter = parameter
        return narrow(parameter, dtype).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        room = GradBuffer(ctx.parameter)
        room.write(gradients[0])
        return room.give(), None
