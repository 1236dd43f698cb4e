"""Tensors of a folder, quantized values paired with their scales by each format's names. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from moe.interchange.quantization import Format, Quantization
from moe.spec import ProblemCode
from moe.storage.tensor_header import HeaderEntry

PLAIN = ("F32", "BF16", "F16", "F64")
MXFP4_BLOCK = 32
"""Values that share one scale, in 16 bytes."""


@dataclass(frozen=True)
class CatalogTensor:
    """A tensor in a folder, with its shape after dequantization."""

    name: str
    shape: tuple[int, ...]
    entry: HeaderEntry
    """Header entry of the tensor, or of its quantized values."""
    format: Format | None = None
    scales: HeaderEntry | None = None
    global_scale: HeaderEntry | None = None
    """Header entry of the scale of all scales (NVFP4)."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns of values that share one scale."""

    @property
    def is_decoded(self) -> bool:
        return self.format is not None

    @property
    def entries(self) -> tuple[HeaderEntry, ...]:
        """Header entries of everything that the tensor is decoded from."""
        return tuple(entry for entry in (self.entry, self.scales, self.global_scale) if entry is not None)

    @property
    def file(self) -> str:
        return self.entry.file


@dataclass(frozen=True)
class Misfit:
    """Quantized values that cannot be decoded."""

    entry: HeaderEntry
    code: ProblemCode
    value: object
    rule: str


@dataclass(frozen=True)
class _PackedFormat:
    """Names, dtypes and shapes of a format that packs several values of a row in one element."""

    values: str
    """Last part of the name of the packed values; that of the tensor is `weight`."""
    dtype: str
    values_per_element: int
    scale_dtypes: tuple[str, ...]
    global_scale: str | None = None
    unused: str | None = None
    """A tensor that decoding does not need: the shape, or the scale of activations."""


_PACKED_FORMATS: Mapping[Format, _PackedFormat] = {
    "pack-quantized": _PackedFormat("weight_packed", "I32", 8, PLAIN, unused="weight_shape"),
    "nvfp4-pack-quantized": _PackedFormat(
        "weight_packed", "U8", 2, ("F8_E4M3",), "weight_global_scale", "input_global_scale"
    ),
    "modelopt-nvfp4": _PackedFormat("weight", "U8", 2, ("F8_E4M3",), "weight_scale_2", "input_scale"),
}
_SCALES = "weight_scale"


def encoded_tensors(
    by_name: Mapping[str, HeaderEntry], quantization: Quantization | None
) -> Iterator[CatalogTensor | Misfit]:
    """Yield the tensors of a folder with these header entries. Values that cannot be decoded are also yielded as they
    are, under the name of the tensor."""
    used_names: set[str] = set()
    for name, entry in by_name.items():
        tensor_name, tensor, names = _decoded(name, entry, by_name, quantization)
        if tensor is None:
            continue
        used_names |= {name, *names}
        yield tensor
        if isinstance(tensor, Misfit):
            yield CatalogTensor(tensor_name, entry.shape, entry)
    for name, entry in by_name.items():
        if name not in used_names:
            yield CatalogTensor(name, entry.shape, entry)


def _decoded(
    name: str, entry: HeaderEntry, by_name: Mapping[str, HeaderEntry], quantization: Quantization | None
) -> tuple[str, CatalogTensor | Misfit | None, tuple[str, ...]]:
    """(name, tensor, names of the other entries that belong to it) of quantized values; no tensor if an entry is none
    of those."""
    if quantization is not None and quantization.format in _PACKED_FORMATS:
        packed_format = _PACKED_FORMATS[quantization.format]
        module, _, last = name.rpartition(".")
        if last != packed_format.values or (last == "weight" and entry.dtype != packed_format.dtype):
            return name, None, ()
        parts = tuple(
            f"{module}.{part}" for part in (_SCALES, packed_format.global_scale, packed_format.unused) if part
        )
        return f"{module}.weight", _packed_tensor(module, entry, by_name, quantization, packed_format), parts
    if quantization is not None and quantization.format == "mxfp4" and name.endswith("_blocks"):
        stem = name.removesuffix("_blocks")
        return stem, _mxfp4(stem, entry, by_name.get(f"{stem}_scales")), (f"{stem}_scales",)
    if entry.dtype.startswith("F8_"):
        return name, _fp8(name, entry, by_name.get(f"{name}_scale_inv"), quantization), (f"{name}_scale_inv",)
    return name, None, ()


def _packed_tensor(
    module: str,
    entry: HeaderEntry,
    by_name: Mapping[str, HeaderEntry],
    quantization: Quantization,
    packed_format: _PackedFormat,
) -> CatalogTensor | Misfit:
    scales = by_name.get(f"{module}.{_SCALES}")
    _, group = quantization.block
    rule = (
        f"{packed_format.dtype} [rows, columns / {packed_format.values_per_element}] with scales "
        f"[rows, columns / {group}] of {' or '.join(packed_format.scale_dtypes)} in {module}.{_SCALES}"
    )
    global_scale = None
    if packed_format.global_scale is not None:
        global_scale = by_name.get(f"{module}.{packed_format.global_scale}")
        rule += f" and one F32 in {module}.{packed_format.global_scale}"
    if scales is None or (global_scale is None and packed_format.global_scale is not None):
        return Misfit(entry, "missing", None, rule)
    rows, columns = (*scales.shape, 0, 0)[:2]
    fits = len(entry.shape) == len(scales.shape) == 2 and entry.dtype == packed_format.dtype
    fits = fits and entry.shape == (rows, ceil(columns * group / packed_format.values_per_element))
    fits = fits and scales.dtype in packed_format.scale_dtypes
    if global_scale is not None:
        fits = fits and global_scale.dtype == "F32" and global_scale.shape in ((), (1,))
    if not fits:
        return Misfit(entry, "shape_mismatch", [list(entry.shape), list(scales.shape)], rule)
    shape = (rows, columns * group)
    return CatalogTensor(
        f"{module}.weight", shape, entry, quantization.format, scales, global_scale, quantization.block
    )


def _mxfp4(stem: str, blocks: HeaderEntry, scales: HeaderEntry | None) -> CatalogTensor | Misfit:
    fits = scales is not None and blocks.dtype == scales.dtype == "U8" and len(blocks.shape) == 4
    if scales is None or not fits or blocks.shape != (*scales.shape, MXFP4_BLOCK // 2):
        shapes = None if scales is None else [list(blocks.shape), list(scales.shape)]
        code: ProblemCode = "missing" if scales is None else "shape_mismatch"
        rule = f"bytes [E, rows, blocks, 16] with scales [E, rows, blocks] in {stem}_scales"
        return Misfit(blocks, code, shapes, rule)
    experts, rows, num_blocks, _ = blocks.shape
    # Rows are outputs; the family's tensors are inputs by outputs.
    return CatalogTensor(stem, (experts, MXFP4_BLOCK * num_blocks, rows), blocks, "mxfp4", scales)


def _fp8(
    name: str, entry: HeaderEntry, scales: HeaderEntry | None, quantization: Quantization | None
) -> CatalogTensor | Misfit:
    if quantization is None or quantization.format != "fp8" or entry.dtype != "F8_E4M3" or scales is None:
        rule = "float32, bfloat16 or float16, or float8_e4m3 in blocks of a quantization_config with scales"
        return Misfit(entry, "dtype_mismatch", entry.dtype, rule)
    block = quantization.block
    grid = tuple(ceil(size / block_size) for size, block_size in zip(entry.shape, block, strict=False))
    if len(entry.shape) != 2 or scales.shape != grid or scales.dtype not in PLAIN:
        rule = f"with scales {list(grid)}, one per {block[0]} by {block[1]} block of its {list(entry.shape)}"
        return Misfit(entry, "shape_mismatch", list(scales.shape), rule)
    return CatalogTensor(name, entry.shape, entry, "fp8", scales, block=block)
