"""Tensors of a folder, quantized values paired with their scales by each format's names. No torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

from moe.interchange.quantization import FP8_BLOCK, NVFP4_BLOCK, Format, Quantization
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
    column_scales: HeaderEntry | None = None
    """Header entry of a factor of each column, by which AWQ (arXiv 2306.00978) divided the weights."""

    @property
    def is_decoded(self) -> bool:
        return self.format is not None

    @property
    def entries(self) -> tuple[HeaderEntry, ...]:
        """Header entries of everything that the tensor is decoded from."""
        scale_entries = (self.scales, self.global_scale, self.column_scales)
        return (self.entry, *(entry for entry in scale_entries if entry is not None))

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
_MODELOPT_PARTS = (_SCALES, "weight_scale_2", "input_scale", "pre_quant_scale")
"""Last parts of the names of tensors beside a `weight` that NVIDIA's Model Optimizer quantized."""
_MXFP8_BLOCK = (1, 32)
_KV_CACHE_SCALES = re.compile(r".*\.([kv]_proj\.)?[kv]_(scale|bias)")
"""Scales and offsets of a quantized KV cache."""


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
    is_modelopt = quantization is not None and quantization.scheme == "modelopt"
    for name, entry in by_name.items():
        if name not in used_names and not (is_modelopt and _KV_CACHE_SCALES.fullmatch(name)):
            yield CatalogTensor(name, entry.shape, entry)


def _decoded(
    name: str, entry: HeaderEntry, by_name: Mapping[str, HeaderEntry], quantization: Quantization | None
) -> tuple[str, CatalogTensor | Misfit | None, tuple[str, ...]]:
    """(name, tensor, names of the other entries that belong to it) of quantized values; no tensor if an entry is none
    of those."""
    if quantization is None:
        scheme = None
    elif (scheme := quantization.scheme) == "modelopt":
        module, _, last = name.rpartition(".")
        if last != "weight" or not (entry.dtype == "U8" or entry.dtype.startswith("F8_")):
            return name, None, ()
        return name, _modelopt(module, entry, by_name), tuple(f"{module}.{part}" for part in _MODELOPT_PARTS)
    elif scheme in _PACKED_FORMATS:
        packed_format = _PACKED_FORMATS[scheme]
        module, _, last = name.rpartition(".")
        if last != packed_format.values:
            return name, None, ()
        parts = tuple(
            f"{module}.{part}" for part in (_SCALES, packed_format.global_scale, packed_format.unused) if part
        )
        tensor = _packed_tensor(module, entry, by_name, scheme, quantization.block)
        return f"{module}.weight", tensor, parts
    if scheme == "mxfp4" and name.endswith("_blocks"):
        stem = name.removesuffix("_blocks")
        return stem, _mxfp4(stem, entry, by_name.get(f"{stem}_scales")), (f"{stem}_scales",)
    if entry.dtype.startswith("F8_"):
        return name, _fp8(name, entry, by_name.get(f"{name}_scale_inv"), quantization), (f"{name}_scale_inv",)
    return name, None, ()


def _packed_tensor(
    module: str, entry: HeaderEntry, by_name: Mapping[str, HeaderEntry], format: Format, block: tuple[int, int]
) -> CatalogTensor | Misfit:
    packed_format, scales = _PACKED_FORMATS[format], by_name.get(f"{module}.{_SCALES}")
    _, group = block
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
    return CatalogTensor(f"{module}.weight", shape, entry, format, scales, global_scale, block)


def _modelopt(module: str, entry: HeaderEntry, by_name: Mapping[str, HeaderEntry]) -> CatalogTensor | Misfit:
    """A `weight` as modelopt/torch/export/quant_utils.py of NVIDIA's Model Optimizer 0.47 writes it: its dtype and its
    scales determine the format."""
    scales, column_scales = by_name.get(f"{module}.{_SCALES}"), by_name.get(f"{module}.pre_quant_scale")
    if entry.dtype != "U8":
        tensor = _modelopt_fp8(module, entry, scales)
    elif f"{module}.weight_scale_2" in by_name:
        tensor = _packed_tensor(module, entry, by_name, "modelopt-nvfp4", NVFP4_BLOCK)
    else:
        tensor = _modelopt_int4(module, entry, scales)
    if isinstance(tensor, Misfit) or column_scales is None:
        return tensor
    if column_scales.shape != tensor.shape[1:] or column_scales.dtype not in PLAIN:
        rule = f"with {tensor.shape[1]} factors of its columns in {column_scales.name}"
        return Misfit(entry, "shape_mismatch", list(column_scales.shape), rule)
    return replace(tensor, column_scales=column_scales)


def _modelopt_fp8(module: str, entry: HeaderEntry, scales: HeaderEntry | None) -> CatalogTensor | Misfit:
    """FP8 with one scale, one a row, one a block of 128 by 128, or one power of two per 32 values of a row (MXFP8)."""
    if scales is None or entry.dtype != "F8_E4M3" or len(entry.shape) != 2:
        rule = f"F8_E4M3 [rows, columns] with scales in {module}.{_SCALES}"
        return Misfit(entry, "missing" if scales is None else "shape_mismatch", [entry.dtype, list(entry.shape)], rule)
    rows, columns = entry.shape
    blocks = {
        (): entry.shape, (1,): entry.shape, (rows,): (1, columns), (rows, 1): (1, columns),
        _grid(entry.shape, FP8_BLOCK): FP8_BLOCK,
        (ceil(rows / FP8_BLOCK[0]), 1, ceil(columns / FP8_BLOCK[1]), 1): FP8_BLOCK,
    }  # fmt: skip
    if scales.dtype == "U8":
        scales, blocks = replace(scales, dtype="F8_E8M0"), {_grid(entry.shape, _MXFP8_BLOCK): _MXFP8_BLOCK}
    block = blocks.get(scales.shape)
    if block is None or scales.dtype not in (*PLAIN, "F8_E8M0"):
        rule = f"with one scale, or scales of shape {' or '.join(str(list(shape)) for shape in blocks if shape)}"
        return Misfit(entry, "shape_mismatch", list(scales.shape), rule)
    grid = replace(scales, shape=_grid(entry.shape, block))
    return CatalogTensor(entry.name, entry.shape, entry, "fp8", grid, block=(block[0], block[1]))


def _modelopt_int4(module: str, entry: HeaderEntry, scales: HeaderEntry | None) -> CatalogTensor | Misfit:
    """Two rows to a byte, the even one in the lower bits, in groups of a row's columns."""
    rule = f"U8 [rows / 2, columns] with scales [rows, columns / group] of {' or '.join(PLAIN)} in {module}.{_SCALES}"
    if scales is None:
        return Misfit(entry, "missing", None, rule)
    shapes = [list(entry.shape), list(scales.shape)]
    if len(entry.shape) != 2 or len(scales.shape) != 2 or scales.dtype not in PLAIN or not prod(scales.shape):
        return Misfit(entry, "shape_mismatch", shapes, rule)
    shape = (2 * entry.shape[0], entry.shape[1])
    if scales.shape[0] != shape[0] or shape[1] % scales.shape[1]:
        return Misfit(entry, "shape_mismatch", shapes, rule)
    block = (1, shape[1] // scales.shape[1])
    return CatalogTensor(entry.name, shape, entry, "modelopt-int4", scales, block=block)


def _grid(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of blocks."""
    return tuple(ceil(size / block_size) for size, block_size in zip(shape, block, strict=False))


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
    if quantization is None or quantization.scheme != "fp8" or entry.dtype != "F8_E4M3" or scales is None:
        rule = "float32, bfloat16 or float16, or float8_e4m3 in blocks of a quantization_config with scales"
        return Misfit(entry, "dtype_mismatch", entry.dtype, rule)
    block = quantization.block
    grid = _grid(entry.shape, block)
    if len(entry.shape) != 2 or scales.shape != grid or scales.dtype not in PLAIN:
        rule = f"with scales {list(grid)}, one per {block[0]} by {block[1]} block of its {list(entry.shape)}"
        return Misfit(entry, "shape_mismatch", list(scales.shape), rule)
    return CatalogTensor(name, entry.shape, entry, "fp8", scales, block=block)
