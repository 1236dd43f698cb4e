"""Buffers of a parameter that persist between steps: a copy in the compute dtype, and a gradient buffer.

New memory is expensive on a CPU: the system maps it page by page, and reclaims large blocks at once. Checkpoints do not
contain buffers. Code that updates parameters must call `keep_buffers` once and `values_changed` after each update:
fused optimizers do not even increment a tensor's version. Of a frozen parameter, in-place operations are noticed, and
writes through `.data` are not.
"""

from typing import Any

import torch
from torch import Tensor, nn

from moe.parallel.mesh import Layout
from moe.parallel.parameters import LocalParameter


class Buffers:
    """Buffers of one parameter. `keeps_narrow`: whether its narrow copy is stored."""

    def __init__(self, *, keeps_narrow: bool) -> None:
        self._keeps_narrow = keeps_narrow
        self._narrow: Tensor | None = None
        self._version: int | None = None
        self._spare: Tensor | None = None
        self._takes_buffers = False
        self.replacement: Tensor | None = None
        """The narrow copy, if it has the parameter's values in place of the parameter (`replace_by_narrow`)."""

    @property
    def narrow_bytes(self) -> int:
        """Bytes of the narrow copy, if there is one."""
        return 0 if self._narrow is None else self._narrow.nbytes

    def narrow(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Values of `parameter` in `dtype`, copied again only if they have changed."""
        if self.replacement is not None:
            assert self.replacement.dtype == dtype, "a weight with sharded masters is computed with in one dtype"
            return self.replacement
        if not self._keeps_narrow:
            return parameter.detach().to(dtype)
        if self._narrow is None or self._narrow.dtype != dtype:
            self._narrow, self._version = torch.empty_like(parameter, dtype=dtype, requires_grad=False), None
        if self._version != parameter._version:
            with torch.no_grad():
                self._narrow.copy_(parameter)
            self._version = parameter._version
        return self._narrow

    @torch.no_grad()
    def replace_by_narrow(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Free the values of `parameter`, whose place its narrow copy takes. A use of the wide ones gives NaN."""
        self._keeps_narrow = True
        self.replacement = self.narrow(parameter, dtype)
        parameter.data = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(
            parameter.shape
        )

    def begin_refresh(self, parameter: Tensor) -> Tensor | None:
        """The narrow copy, if there is one, into which the caller copies the parameter's new values."""
        if self.replacement is not None:
            return None
        self._version = parameter._version
        return self._narrow

    def take_buffer(self, parameter: Tensor) -> Tensor:
        """Uninitialized memory for a gradient, reused from an earlier one if possible."""
        buffer, self._spare, self._takes_buffers = self._spare, None, True
        return torch.empty_like(parameter, requires_grad=False) if buffer is None else buffer

    def return_buffer(self, gradient: Tensor | None) -> None:
        """Keep the memory of `gradient`, if any, for the next one, if this parameter's gradients use `take_buffer`."""
        if gradient is not None and self._takes_buffers:
            self._spare = gradient.detach()


def keep_buffers(parameters: list[LocalParameter], layout: Layout) -> None:
    """Attach buffers to parameters. From then on `values_changed` must follow every update, and only `backward` may
    compute gradients; those of later micro-batches are added in place.

    Parameters that FSDP gathers get none, since they are freed after each use; nor do parts of a user's module, which
    would not use them. Under full recomputation, when memory is scarce, no narrow copies are stored.
    """
    for local_parameter in parameters:
        if local_parameter.local is local_parameter.parameter and local_parameter.part.offsets is None:
            local_parameter.parameter.moe_buffers = Buffers(keeps_narrow=layout.recompute != "full")  # type: ignore[attr-defined]


@torch.no_grad()
def values_changed(parameters: list[LocalParameter]) -> None:
    """Copy the parameters' new values to their narrow copies after an optimizer step, in few launches on a GPU."""
    copies, sources = list[Tensor](), list[Tensor]()
    for local_parameter in parameters:
        parameter = local_parameter.parameter
        buffers = buffers_of(parameter)
        if buffers is not None and (copy := buffers.begin_refresh(parameter)) is not None:
            copies.append(copy)
            sources.append(parameter)
    if copies:
        torch._foreach_copy_(copies, sources)


def buffers_of(parameter: Tensor) -> Buffers | None:
    """Buffers that `keep_buffers` attached to a parameter, if any."""
    return getattr(parameter, "moe_buffers", None)


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`. `Tensor.to` takes 2.5 us to do nothing, and a token's pass has hundreds of these calls."""
    return x if x.dtype == dtype else x.to(dtype)


def narrow(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of `parameter` in `dtype`, without a gradient."""
    if parameter.dtype == dtype:
        return parameter.detach()
    buffers = buffers_of(parameter)
    return parameter.detach().to(dtype) if buffers is None else buffers.narrow(parameter, dtype)


def cast_parameter(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """`parameter` in `dtype`, differentiable."""
    if parameter.dtype == dtype:
        return parameter
    return parameter.to(dtype) if buffers_of(parameter) is None else _CastParameter.apply(parameter, dtype)


class GradBuffer:
    """Gradient buffer of a parameter. If `sums_chunks` gradients are written, they are summed in at least float32."""

    def __init__(self, parameter: Tensor, *, sums_chunks: bool = False) -> None:
        buffers, self._dtype = buffers_of(parameter), parameter.dtype
        self._in_place = buffers is not None and parameter.grad is not None
        self.adds = self._in_place
        """Whether the next gradient is added to the buffer's values."""
        self.tensor: Tensor | None = None
        """None if no memory is allocated: the first gradient becomes the buffer."""
        wide = torch.promote_types(parameter.dtype, torch.float32) if sums_chunks else parameter.dtype
        if self._in_place:
            self.tensor = parameter.grad
        elif buffers is not None and wide == parameter.dtype:
            self.tensor = buffers.take_buffer(parameter)
        elif sums_chunks:
            self.tensor = torch.empty_like(parameter, dtype=wide, requires_grad=False)

    def write(self, gradient: Tensor) -> None:
        """Write `gradient` to the buffer, or add it."""
        if self.tensor is None:
            self.set_sum(gradient)
        else:
            self.set_sum(self.tensor.add_(gradient) if self.adds else self.tensor.copy_(gradient))

    def allocate(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The buffer's memory, allocated in the parameter's dtype if there is none."""
        return torch.empty(shape, dtype=self._dtype, device=device) if self.tensor is None else self.tensor

    def set_sum(self, gradient: Tensor) -> None:
        """Set the buffer to `gradient`, already summed."""
        self.tensor, self.adds = gradient, True

    def to_autograd(self) -> Tensor | None:
        """Return the gradient for autograd, which adopts it as `grad` without a copy if nothing else refers to it; None
        if it was accumulated in place."""
        gradient, self.tensor = self.tensor, None
        return None if self._in_place or gradient is None else gradient.to(self._dtype)


class _CastParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        ctx.parameter = parameter
        return narrow(parameter, dtype).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        buffer = GradBuffer(ctx.parameter)
        buffer.write(gradients[0])
        return buffer.to_autograd(), None
