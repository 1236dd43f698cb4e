"""The weights of experts, as they are kept or as narrow as the rows, and where their gradients are written."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.parallel import Room, narrow


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of E experts, each `[E, ...]`; None for what these experts do not have."""

    w_in: Tensor
    """`[E, M, H]`"""
    w_out: Tensor
    """`[E, H, M]`"""
    w_gate: Tensor | None = None
    """`[E, M, H]`"""
    b_in: Tensor | None = None
    """`[E, H]`"""
    b_out: Tensor | None = None
    """`[E, M]`, or some of its columns, from `b_out_first` on"""
    b_gate: Tensor | None = None
    """`[E, H]`"""
    b_out_first: int = 0
    """The column of the output that `b_out` begins at, where each rank holds some of its entries."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], b_out_first: int = 0) -> "ExpertWeights":
        """From `tensors`, as autograd functions take and give them."""
        w_in, w_out, w_gate, b_in, b_out, b_gate = tensors
        assert w_in is not None
        assert w_out is not None
        return cls(w_in, w_out, w_gate, b_in, b_out, b_gate, b_out_first)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.w_in, self.w_out, self.w_gate, self.b_in, self.b_out, self.b_gate

    @property
    def w_in_and_gate(self) -> Tensor | None:
        """`[E, M, 2 · H]`: `w_in` and `w_gate`, where they lie side by side in memory, else None."""
        up, gate = self.w_in, self.w_gate
        if gate is None or gate.stride() != up.stride():
            return None
        ends = up.storage_offset() + up.shape[2] * up.stride(2)
        if (
            gate.storage_offset() != ends
            or gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr()
        ):
            return None
        return up.as_strided((*up.shape[:2], 2 * up.shape[2]), up.stride())

    def to(self, dtype: torch.dtype) -> "ExpertWeights":
        """In `dtype`, differentiable."""
        return self.of([None if each is None else each.to(dtype) for each in self.tensors], self.b_out_first)

    def narrow(self, dtype: torch.dtype) -> "ExpertWeights":
        """In `dtype`, without gradients: the copies that are kept, where there are some."""
        return self.of(
            [None if each is None else narrow(each, dtype) for each in self.tensors], self.b_out_first
        )

    @property
    def biased(self) -> slice:
        """The columns that `b_out` is added to."""
        assert self.b_out is not None
        return slice(self.b_out_first, self.b_out_first + self.b_out.shape[1])


class WeightGradients:
    """Gradients of the weights of experts as they are made, those of one run of rows after another."""

    def __init__(self, parameters: Sequence[Tensor | None], *, of_several: bool = False) -> None:
        rooms = [None if each is None else Room(each, of_several=of_several) for each in parameters]
        self.w_in, self.w_out, self.w_gate, self.b_in, self.b_out, self.b_gate = rooms
        self._rooms = rooms

    def give(self) -> tuple[Tensor | None, ...]:
        """Gradients for autograd, in the order of `parameters`."""
        return tuple(None if room is None else room.give() for room in self._rooms)
