"""Tensors of a folder, including quantized ones, by their names in the families' tables. No torch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from moe.data.locations import Location
from moe.interchange.config import ConfigDescription, describe_config, family_of
from moe.interchange.family import Family
from moe.interchange.headers import entries
from moe.interchange.hub_folder import CONFIG, HubFolder
from moe.interchange.quantization import Quantization
from moe.spec import Problem, ProblemCode, SpecError
from moe.storage.tensor_header import HeaderEntry

PLAIN = ("F32", "BF16", "F16", "F64")
MXFP4_BLOCK = 32
"""Values that share one scale, in 16 bytes."""
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
"""Tensors of old checkpoints that can be computed from the config."""


@dataclass(frozen=True)
class CatalogTensor:
    """A tensor in a folder, with its shape after dequantization."""

    name: str
    shape: tuple[int, ...]
    entry: HeaderEntry
    """Header entry of the tensor, or of its quantized values."""
    scales: HeaderEntry | None = None
    block: tuple[int, int] = (1, 1)
    """Rows and columns of FP8 values that share one scale."""

    @property
    def is_decoded(self) -> bool:
        return self.scales is not None

    @property
    def file(self) -> str:
        return self.entry.file


@dataclass
class Catalog:
    """Config and tensors of a folder, read from config and headers alone."""

    folder: HubFolder
    config: dict[str, object]
    description: ConfigDescription
    files: dict[str, Location]
    tensors: dict[str, CatalogTensor] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def problem(self, code: ProblemCode, name: str, rule: str, remedy: str, value: object = None) -> Problem:
        """Problem for one of the folder's tensors."""
        tensor = self.tensors.get(name)
        path_of_file = self.folder.url if tensor is None else self.folder.path(tensor.file)
        return Problem(code, f"{path_of_file}:{name}", value, rule, remedy)


def catalog(folder: HubFolder) -> Catalog:
    """Read a folder. Raises SpecError with all problems of its config, else with all unreadable files."""
    config, _ = folder.config()
    folder_catalog = Catalog(folder, config, describe_config(config, folder.path(CONFIG)), folder.weight_files())
    tensor_entries: list[HeaderEntry] = []
    problems: list[Problem] = []
    for file, location in folder_catalog.files.items():
        try:
            tensor_entries += entries(file, location, folder.place)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    by_name: dict[str, HeaderEntry] = {}
    is_base_model = _is_base_model(tensor_entries)
    for entry in tensor_entries:
        name = f"model.{entry.name}" if is_base_model and not entry.name.startswith("lm_head.") else entry.name
        if name in by_name:
            folder_catalog.problems.append(Problem("duplicate", f"{folder.path(entry.file)}:{entry.name}", None,
                                          f"is also in {by_name[name].file}", "remove one of them"))  # fmt: skip
        if not _IGNORED.fullmatch(name):
            by_name[name] = entry
    for tensor in _pair_with_scales(by_name, folder_catalog.description.quantization, folder_catalog):
        folder_catalog.tensors[tensor.name] = tensor
    return folder_catalog


def family_in(folder: HubFolder) -> Family:
    """Family of a folder's model. Raises SpecError."""
    return family_of(folder.config()[0], folder.path(CONFIG))


def _is_base_model(tensor_entries: list[HeaderEntry]) -> bool:
    """Whether names lack the prefix `model.` that they have in a model with an output head."""
    names = {entry.name for entry in tensor_entries}
    return "embed_tokens.weight" in names and not any(name.startswith("model.") for name in names)


def _pair_with_scales(
    by_name: dict[str, HeaderEntry], quantization: Quantization | None, catalog: Catalog
) -> Iterator[CatalogTensor]:
    used_names: set[str] = set()
    for name, entry in by_name.items():
        stem = name.removesuffix("_blocks")
        if quantization is not None and quantization.method == "mxfp4" and stem != name:
            scales = by_name.get(f"{stem}_scales")
            if scales is None or entry.dtype != "U8" or scales.dtype != "U8" or not _mxfp4_fits(entry, scales):
                shapes = None if scales is None else [list(entry.shape), list(scales.shape)]
                code: ProblemCode = "missing" if scales is None else "shape_mismatch"
                rule = f"bytes [E, rows, blocks, 16] with scales [E, rows, blocks] in {stem}_scales"
                catalog.problems.append(_misfit(catalog, code, entry, shapes, rule))
                continue
            experts, rows, blocks, _ = entry.shape
            used_names |= {name, f"{stem}_scales"}
            # Rows are outputs; the family's tensors are inputs by outputs.
            yield CatalogTensor(stem, (experts, MXFP4_BLOCK * blocks, rows), entry, scales)
        elif entry.dtype.startswith("F8_"):
            scales = by_name.get(f"{name}_scale_inv")
            block = (1, 1) if quantization is None else quantization.block
            grid = tuple(ceil(size / block_size) for size, block_size in zip(entry.shape, block, strict=False))
            if quantization is None or quantization.method != "fp8" or entry.dtype != "F8_E4M3" or scales is None:
                rule = "float32, bfloat16 or float16, or float8_e4m3 in blocks of a quantization_config with scales"
                catalog.problems.append(_misfit(catalog, "dtype_mismatch", entry, entry.dtype, rule))
                continue
            if len(entry.shape) != 2 or scales.shape != grid or scales.dtype not in PLAIN:
                rule = f"with scales {list(grid)}, one per {block[0]} by {block[1]} block of its {list(entry.shape)}"
                catalog.problems.append(_misfit(catalog, "shape_mismatch", entry, list(scales.shape), rule))
                continue
            used_names |= {name, f"{name}_scale_inv"}
            yield CatalogTensor(name, entry.shape, entry, scales, block)
    for name, entry in by_name.items():
        if name not in used_names:
            yield CatalogTensor(name, entry.shape, entry)


def _mxfp4_fits(blocks: HeaderEntry, scales: HeaderEntry) -> bool:
    return len(blocks.shape) == 4 and blocks.shape[3] == MXFP4_BLOCK // 2 and blocks.shape[:3] == scales.shape


def _misfit(catalog: Catalog, code: ProblemCode, entry: HeaderEntry, value: object, rule: str) -> Problem:
    return Problem(
        code, f"{catalog.folder.path(entry.file)}:{entry.name}", value, f"must be {rule}", "use the folder as published"
    )
