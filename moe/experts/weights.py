"""Weights of a rank's experts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from moe.parallel import QuantizedWeight, QuantScheme, narrow

Matrix = Literal["w_in", "w_out", "w_gate"]


@dataclass(frozen=True)
class ExpertSettings:
    """Numbers that belong to expert weights."""

    b_out_first: int = 0
    """First output column of `b_out`, if each rank holds some of its entries."""
    in_lora_scale: float = 0.0
    """Scale of the LoRA adapter (arXiv 2106.09685) of `w_in` and `w_gate`."""
    out_lora_scale: float = 0.0
    """Scale of the LoRA adapter of `w_out`."""
    in_scheme: QuantScheme | None = None
    """Quantization of `w_in` and `w_gate`, if they are quantized."""
    out_scheme: QuantScheme | None = None


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of E experts, tensors `[E, ...]`; None for matrices and biases that the experts lack."""

    w_in: Tensor
    """`[E, M, H]`, or its quantized codes, like the next two; `matrix` dequantizes them."""
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
    """`[E, M, r]`: LoRA adapter, like the next four; this one is shared by w_in and w_gate."""
    in_lora_b: Tensor | None = None
    """`[E, r, H]`"""
    gate_lora_b: Tensor | None = None
    """`[E, r, H]`"""
    out_lora_a: Tensor | None = None
    """`[E, H, r]`"""
    out_lora_b: Tensor | None = None
    """`[E, r, M]`"""
    in_scales: Tensor | None = None
    """Scales of the quantized weights, like the next two."""
    gate_scales: Tensor | None = None
    out_scales: Tensor | None = None
    settings: ExpertSettings = ExpertSettings()

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[Tensor | None], settings: ExpertSettings = ExpertSettings()
    ) -> "ExpertWeights":
        """Build from `tensors` in the order of `ExpertWeights.tensors`; trailing ones may be omitted."""
        w_in, w_out, *optional_tensors = tensors
        assert w_in is not None
        assert w_out is not None
        return cls(w_in, w_out, settings=settings, **dict(zip(_OPTIONAL_TENSORS, optional_tensors, strict=False)))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (*self.base_tensors, *self.adapters, *self.scales)

    @property
    def base_tensors(self) -> tuple[Tensor | None, ...]:
        """Matrices or their quantized codes, and biases, without adapters."""
        return self.w_in, self.w_out, self.w_gate, self.b_in, self.b_out, self.b_gate

    @property
    def adapters(self) -> tuple[Tensor | None, ...]:
        return self.in_lora_a, self.in_lora_b, self.gate_lora_b, self.out_lora_a, self.out_lora_b

    @property
    def scales(self) -> tuple[Tensor | None, ...]:
        return self.in_scales, self.gate_scales, self.out_scales

    @property
    def is_quantized(self) -> bool:
        return self.settings.in_scheme is not None

    def matrix(self, name: Matrix, dtype: torch.dtype) -> Tensor:
        """Return a matrix, dequantized to `dtype` if quantized; otherwise it must have that dtype already."""
        codes: Tensor | None = getattr(self, name)
        assert codes is not None
        scheme = self.settings.out_scheme if name == "w_out" else self.settings.in_scheme
        if scheme is None:
            return codes
        return QuantizedWeight(codes, getattr(self, f"{name.removeprefix('w_')}_scales"), scheme).dequantize(dtype)

    @property
    def w_in_and_gate(self) -> Tensor | None:
        """`[E, M, 2 · H]`: `w_in` and `w_gate` as one view if they are adjacent in memory, else None."""
        up, gate = self.w_in, self.w_gate
        if self.is_quantized or gate is None or gate.stride() != up.stride():
            return None
        ends = up.storage_offset() + up.shape[2] * up.stride(2)
        if gate.storage_offset() != ends or gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr():
            return None
        return up.as_strided((*up.shape[:2], 2 * up.shape[2]), up.stride())

    def to(self, dtype: torch.dtype) -> "ExpertWeights":
        """Convert to `dtype`, differentiably, dequantizing codes."""
        names: tuple[Matrix, ...] = ("w_in", "w_out", "w_gate")
        matrices = [None if getattr(self, name) is None else self.matrix(name, dtype) for name in names]
        vectors_and_adapters = (*self.base_tensors[len(names) :], *self.adapters)
        settings = replace(self.settings, in_scheme=None, out_scheme=None)
        return self.from_tensors(
            [None if tensor is None else tensor.to(dtype) for tensor in (*matrices, *vectors_and_adapters)], settings
        )

    def narrow(self, dtype: torch.dtype) -> "ExpertWeights":
        """Convert to `dtype` without gradients, using the stored narrow copies where there are any. Codes are
        unchanged."""
        codes_and_scales = (
            {id(tensor) for tensor in (*self.base_tensors[:3], *self.scales)} if self.is_quantized else set[int]()
        )
        return self.from_tensors(
            [
                tensor if tensor is None or id(tensor) in codes_and_scales else narrow(tensor, dtype)
                for tensor in self.tensors
            ],
            self.settings,
        )

    @property
    def bias_columns(self) -> slice:
        """Output columns that `b_out` is added to."""
        assert self.b_out is not None
        return slice(self.settings.b_out_first, self.settings.b_out_first + self.b_out.shape[1])


_OPTIONAL_TENSORS = tuple(weight_field.name for weight_field in fields(ExpertWeights))[2:-1]
"""Names of all tensors but the first two, in the order of `ExpertWeights.tensors`."""
