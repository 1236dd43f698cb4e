"""Block sizes of the kernels by GPU architecture: a default, and others to measure."""

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch


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
_OTHERS_SM80 = {
    "first_products": (Config(128, 64, 32, 4, 3), Config(64, 128, 32, 8, 3), Config(64, 64, 32, 4, 4)),
    "product": (
        Config(128, 256, 32, 8, 3), Config(256, 128, 32, 8, 3), Config(128, 128, 32, 4, 3), Config(64, 256, 32, 8, 3),
        Config(64, 128, 32, 4, 4),
    ),
    "hidden_gradients": (Config(64, 32, 32, 4, 4),),
    "weight_gradient": (Config(128, 128, 32, 8, 4), Config(64, 128, 32, 4, 4)),
}  # fmt: skip
_OTHERS_SM90 = {
    "first_products": (
        Config(128, 128, 64, 8, 3), Config(128, 128, 32, 8, 3), Config(128, 64, 64, 4, 3), Config(64, 128, 64, 8, 3),
        Config(64, 64, 64, 4, 4),
    ),
    "product": (
        Config(128, 256, 64, 8, 3), Config(256, 128, 64, 8, 3), Config(128, 128, 64, 4, 3), Config(64, 256, 64, 8, 3),
        Config(64, 128, 64, 4, 4),
    ),
    "hidden_gradients": (Config(64, 32, 64, 4, 4),),
    "weight_gradient": (Config(128, 128, 32, 8, 4), Config(64, 128, 64, 4, 4)),
}  # fmt: skip
_OTHERS_SM100 = {
    "first_products": (Config(64, 128, 64, 8, 3), Config(64, 64, 64, 4, 4)),
    "product": _OTHERS_SM90["product"],
    "hidden_gradients": (Config(128, 64, 64, 8, 3), Config(64, 128, 64, 8, 3), Config(64, 32, 64, 4, 4)),
    "weight_gradient": _OTHERS_SM90["weight_gradient"],
}
OTHERS = {8: _OTHERS_SM80, 9: _OTHERS_SM90, 10: _OTHERS_SM100}
"""Further configurations for operands of two bytes, which spill no registers either."""
Tiles = Mapping[str, tuple[int, ...]]
"""Configurations other than the defaults, by kernel: the fields of `Config`."""


@dataclass(frozen=True)
class Configs:
    """Configurations of all kernels with tiles on one device."""

    by_kernel: dict[str, Config]
    num_programs: int
    """Programs that run at once: the device's multiprocessors."""
    precision: str = "ieee"
    """How float32 operands are multiplied, as Triton's `input_precision`."""

    def with_tiles(self, tiles: Tiles | None) -> "Configs":
        """These, with other configurations for the kernels in `tiles`."""
        if not tiles:
            return self
        return replace(self, by_kernel={**self.by_kernel, **{name: Config(*sizes) for name, sizes in tiles.items()}})

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
    def others(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(kernel, its configuration other than the default) for a CUDA device; only for operands of two bytes."""
        if device.type == "cuda" and dtype.itemsize == 2:
            major = min(torch.cuda.get_device_properties(device).major, max(OTHERS))
            for name, configs in OTHERS[major].items():
                yield from ((name, astuple(config)) for config in configs)

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
