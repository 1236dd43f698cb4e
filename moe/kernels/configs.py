"""Launch configurations of the kernels by GPU architecture: a default and candidates for autotuning."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

MAX_NORM_WIDTH = 1 << 13
"""Widest rows that one program normalizes without spilling registers."""


@dataclass(frozen=True)
class Config:
    """Tile of one kernel, and how Triton compiles it."""

    block_rows: int
    """Rows of a tile; of a weight gradient, input columns."""
    block_columns: int
    block_inner: int
    """Operand columns multiplied at a time; of a weight gradient, rows."""
    num_warps: int
    num_stages: int
    uses_tma: bool = False
    """Whether weights are loaded by tensor descriptors, where their memory order and alignment allow it."""

    @classmethod
    def from_fields(cls, fields: Iterable[int]) -> "Config":
        """The inverse of `dataclasses.astuple`."""
        block_rows, block_columns, block_inner, num_warps, num_stages, uses_tma = fields
        return cls(block_rows, block_columns, block_inner, num_warps, num_stages, bool(uses_tma))


_SM80 = {
    "first_products": Config(128, 64, 32, 8, 3),
    "product": Config(128, 128, 32, 8, 3),
    "hidden_gradients": Config(64, 64, 32, 8, 3),
    "weight_gradient": Config(128, 128, 32, 8, 3),
}
_SM90 = {
    "first_products": Config(128, 64, 64, 8, 3),
    "product": Config(128, 128, 64, 8, 3),
    "hidden_gradients": Config(64, 64, 64, 8, 3),
    "weight_gradient": Config(128, 128, 64, 8, 3),
}
_BY_CAPABILITY = {8: _SM80, 9: _SM90, 10: _SM90}
"""Default configurations for operands of two bytes, by major compute capability. Chosen by registers, spills and shared
memory as compiled (`benchmarks/kernels_ahead.py`); none has been measured on a GPU."""
_CANDIDATES_SM80 = {
    "first_products": (Config(128, 64, 32, 4, 3), Config(64, 128, 32, 8, 3), Config(64, 64, 32, 4, 4)),
    "product": (
        Config(128, 256, 32, 8, 3), Config(256, 128, 32, 8, 3), Config(128, 128, 32, 4, 3), Config(64, 256, 32, 8, 3),
        Config(64, 128, 32, 4, 4),
    ),
    "hidden_gradients": (Config(64, 32, 32, 4, 4),),
    "weight_gradient": (Config(128, 128, 32, 8, 4), Config(64, 128, 32, 4, 4)),
}  # fmt: skip
_CANDIDATES_SM90 = {
    "first_products": (
        Config(128, 128, 64, 8, 3), Config(128, 128, 32, 8, 3), Config(64, 128, 64, 8, 3),
        Config(64, 64, 64, 4, 4),
    ),
    "product": (
        Config(128, 256, 64, 8, 3), Config(256, 128, 64, 8, 3), Config(128, 128, 64, 4, 3), Config(64, 256, 64, 8, 3),
        Config(64, 128, 64, 4, 4),
    ),
    "hidden_gradients": (Config(64, 32, 64, 4, 4),),
    "weight_gradient": (Config(128, 128, 32, 8, 4), Config(64, 128, 64, 4, 4)),
}  # fmt: skip
_CANDIDATES_SM100 = {
    "first_products": (Config(64, 128, 64, 8, 3), Config(64, 64, 64, 4, 4)),
    "product": _CANDIDATES_SM90["product"],
    "hidden_gradients": (Config(128, 64, 64, 8, 3), Config(64, 128, 64, 8, 3), Config(64, 32, 64, 4, 4)),
    "weight_gradient": _CANDIDATES_SM90["weight_gradient"],
}
_TMA_SM90 = {
    "first_products": (
        Config(128, 64, 64, 8, 3, uses_tma=True), Config(128, 128, 64, 8, 3, uses_tma=True),
        Config(64, 64, 64, 4, 4, uses_tma=True),
    ),
    "product": (
        Config(128, 128, 64, 8, 3, uses_tma=True), Config(128, 256, 64, 8, 3, uses_tma=True),
        Config(128, 128, 64, 8, 4, uses_tma=True),
    ),
    "hidden_gradients": (Config(64, 64, 64, 8, 3, uses_tma=True), Config(64, 32, 64, 4, 4, uses_tma=True)),
    "weight_gradient": (),
}  # fmt: skip
_TMA_SM100 = {**_TMA_SM90, "hidden_gradients": (Config(64, 32, 64, 4, 4, uses_tma=True),)}
CANDIDATES = {
    8: _CANDIDATES_SM80,
    9: {name: (*configs, *_TMA_SM90[name]) for name, configs in _CANDIDATES_SM90.items()},
    10: {name: (*configs, *_TMA_SM100[name]) for name, configs in _CANDIDATES_SM100.items()},
}
"""Candidates for autotuning, for 2-byte operands; none spills registers without biases, adapters and clamps."""
ConfigOverrides = Mapping[str, tuple[int, ...]]
"""Configurations (fields of `Config`) that replace the defaults, by kernel name."""


@dataclass(frozen=True)
class Configs:
    """Configurations of all kernels with tiles on one device."""

    by_kernel: dict[str, Config]
    num_programs: int
    """Programs that run at once: the device's multiprocessors."""
    precision: str = "ieee"
    """How float32 operands are multiplied, as Triton's `input_precision`."""

    def with_overrides(self, overrides: ConfigOverrides | None) -> "Configs":
        """Copy with the configurations in `overrides` replaced."""
        if not overrides:
            return self
        override_configs = {name: Config.from_fields(fields) for name, fields in overrides.items()}
        return replace(self, by_kernel={**self.by_kernel, **override_configs})

    def for_kernel(self, kernel: Any) -> Config:
        """Configuration of a kernel."""
        return self.by_kernel[kernel.__name__]

    @classmethod
    def for_capability(cls, major: int, num_programs: int, *, itemsize: int = 2, precision: str = "ieee") -> "Configs":
        """Configurations for GPUs of a major compute capability and operands of `itemsize` bytes. Newer GPUs get those
        of the newest known."""
        by_kernel = _BY_CAPABILITY[min(major, max(_BY_CAPABILITY))]
        if itemsize == 4:  # tiles of as many bytes, in as many registers
            by_kernel = {name: _for_wide_operands(name, config) for name, config in by_kernel.items()}
        return cls(by_kernel, num_programs, precision)

    @staticmethod
    def candidates(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(kernel name, candidate configuration) pairs for a CUDA device and 2-byte operands; empty otherwise."""
        if device.type == "cuda" and dtype.itemsize == 2:
            major = min(torch.cuda.get_device_properties(device).major, max(CANDIDATES))
            for name, configs in CANDIDATES[major].items():
                yield from ((name, astuple(config)) for config in configs)

    @classmethod
    def valid_overrides(
        cls, overrides: ConfigOverrides, device: torch.device, dtype: torch.dtype
    ) -> dict[str, tuple[int, ...]]:
        """Overrides that are candidates for a device and dtype. Others were measured on another kind of GPU, for
        operands of another size, or by another release."""
        candidates = {*cls.candidates(device, dtype)}
        return {name: tuple(fields) for name, fields in overrides.items() if (name, tuple(fields)) in candidates}

    @classmethod
    def for_device(cls, device: torch.device, dtype: torch.dtype) -> "Configs":
        """Configurations for a device: a CUDA device, or another that Triton's interpreter rehearses."""
        if device.type != "cuda":
            return cls.for_capability(min(_BY_CAPABILITY), 1)
        properties = torch.cuda.get_device_properties(device)
        precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
        return cls.for_capability(
            properties.major, properties.multi_processor_count, itemsize=dtype.itemsize, precision=precision
        )


def _for_wide_operands(name: str, config: Config) -> Config:
    """`config` for operands of four bytes."""
    rows = config.block_rows // 2 if name == "hidden_gradients" else config.block_rows
    return replace(config, block_rows=rows, block_inner=max(16, config.block_inner // 2))
