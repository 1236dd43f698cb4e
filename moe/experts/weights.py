"""The weights of experts, as they are kept or as narrow as the rows, and where their gradients are written."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from moe.parallel import GradBuffer, QuantizedWeight, QuantScheme, narrow

Matrix = Literal["w_in", "w_out", "w_gate"]


@dataclass(frozen=True)
class ExpertSettings:
    """Numbers that go with the weights of experts."""

    b_out_first: int = 0
    """The column of the output that `b_out` begins at, where each rank holds some of its entries."""
    lora_scale: float = 0.0
    """Factor of what adapters give (arXiv 2106.09685)."""
    coded_in: QuantScheme | None = None
    """How `w_in` and `w_gate` are kept, where they are codes."""
    coded_out: QuantScheme | None = None


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of E experts, each `[E, ...]`; None for what these experts do not have."""

    w_in: Tensor
    """`[E, M, H]`, or its codes, as the next two; `matrix` decodes them."""
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
    in_lora_a: Tensor | None = None
    """`[E, M, r]`: an adapter's, as the next ones; this one of w_in and w_gate."""
    in_lora_b: Tensor | None = None
    """`[E, r, H]`"""
    gate_lora_b: Tensor | None = None
    """`[E, r, H]`"""
    out_lora_a: Tensor | None = None
    """`[E, H, r]`"""
    out_lora_b: Tensor | None = None
    """`[E, r, M]`"""
    in_scales: Tensor | None = None
    """Of codes, as the next ones."""
    gate_scales: Tensor | None = None
    out_scales: Tensor | None = None
    settings: ExpertSettings = ExpertSettings()

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[Tensor | None], settings: ExpertSettings = ExpertSettings()
    ) -> "ExpertWeights":
        """From `tensors`, as autograd functions take and give them; the last ones may be left out."""
        w_in, w_out, *optional_tensors = tensors
        assert w_in is not None
        assert w_out is not None
        return cls(w_in, w_out, settings=settings, **dict(zip(_OTHERS, optional_tensors, strict=False)))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (*self.own, *self.adapters, *self.scales)

    @property
    def own(self) -> tuple[Tensor | None, ...]:
        """Matrices, or their codes, and biases, without adapters."""
        return self.w_in, self.w_out, self.w_gate, self.b_in, self.b_out, self.b_gate

    @property
    def adapters(self) -> tuple[Tensor | None, ...]:
        return self.in_lora_a, self.in_lora_b, self.gate_lora_b, self.out_lora_a, self.out_lora_b

    @property
    def scales(self) -> tuple[Tensor | None, ...]:
        return self.in_scales, self.gate_scales, self.out_scales

    @property
    def is_coded(self) -> bool:
        return self.settings.coded_in is not None

    def matrix(self, name: Matrix, dtype: torch.dtype) -> Tensor:
        """One of the matrices, decoded into `dtype` where it is kept as codes; it is as narrow as that where not."""
        codes: Tensor | None = getattr(self, name)
        assert codes is not None
        coding = self.settings.coded_out if name == "w_out" else self.settings.coded_in
        if coding is None:
            return codes
        return QuantizedWeight(codes, getattr(self, f"{name.removeprefix('w_')}_scales"), coding).dequantize(
            dtype
        )

    @property
    def w_in_and_gate(self) -> Tensor | None:
        """`[E, M, 2 · H]`: `w_in` and `w_gate`, where they lie side by side in memory, else None."""
        up, gate = self.w_in, self.w_gate
        if self.is_coded or gate is None or gate.stride() != up.stride():
            return None
        ends = up.storage_offset() + up.shape[2] * up.stride(2)
        if (
            gate.storage_offset() != ends
            or gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr()
        ):
            return None
        return up.as_strided((*up.shape[:2], 2 * up.shape[2]), up.stride())

    def to(self, dtype: torch.dtype) -> "ExpertWeights":
        """In `dtype`, differentiable; what is kept as codes decoded."""
        names: tuple[Matrix, ...] = ("w_in", "w_out", "w_gate")
        matrices = [None if getattr(self, name) is None else self.matrix(name, dtype) for name in names]
        vectors_and_adapters = (*self.own[len(names) :], *self.adapters)
        settings = replace(self.settings, coded_in=None, coded_out=None)
        return self.from_tensors(
            [None if tensor is None else tensor.to(dtype) for tensor in (*matrices, *vectors_and_adapters)],
            settings,
        )

    def narrow(self, dtype: torch.dtype) -> "ExpertWeights":
        """In `dtype`, without gradients: the copies that are kept, where there are some. Codes stay as they are."""
        as_kept = {id(tensor) for tensor in (*self.own[:3], *self.scales)} if self.is_coded else set[int]()
        return self.from_tensors(
            [
                tensor if tensor is None or id(tensor) in as_kept else narrow(tensor, dtype)
                for tensor in self.tensors
            ],
            self.settings,
        )

    @property
    def biased(self) -> slice:
        """The columns that `b_out` is added to."""
        assert self.b_out is not None
        return slice(self.settings.b_out_first, self.settings.b_out_first + self.b_out.shape[1])


_OTHERS = tuple(weight_field.name for weight_field in fields(ExpertWeights))[2:-1]
"""Names of all but the first two tensors, in the order of `ExpertWeights.tensors`."""


class WeightGradients:
    """Gradients of the weights of experts as they are made, those of one run of rows after another; of those that are
    not trained there is no room."""

    def __init__(self, parameters: Sequence[Tensor | None], *, of_several: bool = False) -> None:
        self._rooms = [
            None
            if parameter is None or not parameter.requires_grad
            else GradBuffer(parameter, of_several=of_several)
            for parameter in parameters
        ]
        (
            self.w_in, self.w_out, self.w_gate, self.b_in, self.b_out, self.b_gate,
            self.in_lora_a, self.in_lora_b, self.gate_lora_b, self.out_lora_a, self.out_lora_b, *_,
        ) = self._rooms  # fmt: skip

    def give(self) -> tuple[Tensor | None, ...]:
        """Gradients for autograd, in the order of `parameters`."""
        return tuple(None if room is None else room.give() for room in self._rooms)
