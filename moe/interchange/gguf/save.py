"""Writing of a model to a GGUF file: atomically, tensor by tensor, in blocks of bounded size."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moe.interchange.config import build_config, family_of
from moe.interchange.copying import fill_folder_tensor
from moe.interchange.gguf.compatibility import architecture_of
from moe.interchange.gguf.matrix_type import GgufType
from moe.interchange.gguf.metadata import add_hyperparameters
from moe.interchange.gguf.tensors import GgufTensor, gguf_tensors
from moe.interchange.gguf.vocabulary import add_vocabulary
from moe.interchange.hub_folder import CONFIG
from moe.interchange.origin import Origin
from moe.interchange.save import blocks, small_files
from moe.interchange.sources import TensorSource
from moe.spec import LanguageModelSpec, spec_error

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

INSTALL = "pip install 'shardyard[gguf]'"
_FILE_TYPES = {GgufType.F32: "ALL_F32", GgufType.F16: "MOSTLY_F16", GgufType.BF16: "MOSTLY_BF16",
               GgufType.Q8_0: "MOSTLY_Q8_0"}  # fmt: skip


def save_gguf(
    spec: LanguageModelSpec,
    source: TensorSource,
    target: str | Path,
    *,
    name: str,
    type: GgufType,
    origin: Origin | None = None,
    files: Mapping[str, bytes] | None = None,
    max_tokens: int | None = None,
) -> None:
    """Write a model with its tokenizer to a new GGUF file, atomically, under the `name` that llama.cpp shows.

    Matrices have this type; norms, biases and routers are float32, and with `Q8_0` matrices whose rows are no multiple
    of 32 are float16. `origin`, `files` and `max_tokens` are those of `save_folder`. Untrained tensors of the origin,
    such as multi-token-prediction heads, are left out. Raises SpecError if llama.cpp would compute or encode something
    else, OSError if the file cannot be written, ModuleNotFoundError without the package gguf.
    """
    import gguf

    config = build_config(spec, None if origin is None else origin.config, "bfloat16")
    architecture = architecture_of(spec, config)
    if origin is None and max_tokens is not None and spec.attention.rope.scaling is None:
        config["max_position_embeddings"] = max_tokens
    text_config = family_of(config, CONFIG).text_config(config)
    writer = gguf.GGUFWriter(None, architecture.name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[type]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_hyperparameters(writer, spec, architecture, int(text_config["max_position_embeddings"]))
    add_vocabulary(writer, small_files(config, origin, files or {}, {}, spec), spec.vocab_size)
    tensors = list(gguf_tensors(spec, architecture))
    types = [_type_of(tensor, gguf.GGMLQuantizationType[type.name]) for tensor in tensors]
    for tensor, tensor_type in zip(tensors, types, strict=True):
        num_bytes = prod(gguf.quant_shape_to_byte_shape(tensor.shape, tensor_type))
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), num_bytes, tensor_type)
    with _draft(target) as draft:
        try:
            writer.write_header_to_file(draft)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor, tensor_type in zip(tensors, types, strict=True):
                _write(writer, tensor, tensor_type, source)
        finally:
            writer.close()


def _type_of(tensor: GgufTensor, type: "GGMLQuantizationType") -> "GGMLQuantizationType":
    """Type of a tensor in a file of this type, as llama.cpp's tools choose it."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    is_matrix = tensor.name.endswith(".weight") and len(tensor.shape) > 1
    if not is_matrix or tensor.name.endswith("ffn_gate_inp.weight"):
        return GGMLQuantizationType.F32
    block, _ = GGML_QUANT_SIZES[type]
    return GGMLQuantizationType.F16 if tensor.shape[-1] % block else type


def _write(writer: "GGUFWriter", tensor: GgufTensor, type: "GGMLQuantizationType", source: TensorSource) -> None:
    """Append a tensor block by block: the writer's own method takes a whole tensor, which experts are too large for."""
    from gguf import quantize

    assert writer.fout is not None
    (stream,) = writer.fout
    writer.write_padding(stream, stream.tell())
    for region in blocks(tensor.shape):
        block = tensor.values
        if block is None:
            block = torch.empty([end - first for first, end in region], dtype=torch.float32)
            fill_folder_tensor(block, region, tensor.components, source.read)
            if tensor.transform is not None:
                block = tensor.transform(block)
        with np.errstate(over="ignore"):  # reported below
            values = quantize(block.numpy(), type)
        stream.write(_checked(block, tensor.name, type, values))
    writer.write_padding(stream, stream.tell())


def _checked(block: Tensor, name: str, type: "GGMLQuantizationType", values: "np.ndarray") -> bytes:
    """Bytes of a block. Raises SpecError if float16 is too narrow for a value."""
    if values.dtype == np.float16 and not np.isfinite(values).all() and bool(block.isfinite().all()):
        largest = float(block.abs().max())
        raise spec_error(
            "out_of_range", name, largest, f"does not fit in {type.name}", "write it as bf16 or f32 (--outtype)"
        )
    return bytes(values.tobytes())


@contextmanager
def _draft(target: str | Path) -> Iterator[Path]:
    """Path of a file that takes the target's place only if the block succeeds. Raises SpecError if that exists."""
    path = Path(target).absolute()
    if path.exists() or path.is_symlink():
        raise spec_error("already_exists", "target", str(target), "already exists", "name a new file")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()
