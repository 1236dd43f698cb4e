"""Export of a language model's checkpoint as a Hugging Face folder, streamed without holding the whole model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe.data.conversations.template import CHAT_TEMPLATE, TRAINING_TEMPLATE, has_template
from moe.data.sequences import CLOSERS
from moe.data.special_tokens import json_object
from moe.export.trained_model import module_checkpoint_error, stored_names, verify_checkpoint
from moe.interchange.adapters import save_adapter
from moe.interchange.catalog import catalog
from moe.interchange.copying import fill_parameter, skip_check
from moe.interchange.fitting import fit
from moe.interchange.hub_folder import HubFolder
from moe.interchange.merged import MergedSource
from moe.interchange.origin import RECORD, Origin
from moe.interchange.save import MAX_SHARD_BYTES, save_folder
from moe.interchange.sources import TensorSource
from moe.interchange.tensor_reader import TensorReader
from moe.spec import JobSpec, LanguageModelSpec, ModuleModelSpec
from moe.spec.adapter_names import is_adapter
from moe.spec.parameter import Slices
from moe.storage.folder import Folder
from moe.tasks.language.pretrained import GENERATION, base_digest
from moe.train.checkpoint.checkpointer import CheckpointError
from moe.train.checkpoint.parts import StoredParts
from moe.train.checkpoint.run_files import TOKENIZERS, files_of
from moe.train.checkpoint.spec_changes import spec_of

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
"""Dtype of exported weights by training dtype; others are written as bfloat16."""


class CheckpointSource(TensorSource):
    """Parameters of a checkpoint."""

    def __init__(self, checkpoint: Folder, *, use_ema: bool = False) -> None:
        """`use_ema`: read the averages of the weights instead of the weights."""
        self._parts, self._stored_name = StoredParts(checkpoint), stored_names(checkpoint, use_ema=use_ema)

    def read(self, name: str, region: Slices, dtype: torch.dtype | None = None) -> Tensor:
        return self._parts.read(self._stored_name(name), region)


class AdapterWithBaseSource(TensorSource):
    """Adapter weights from a checkpoint, and base weights from the pretrained folder."""

    def __init__(self, adapters: TensorSource, spec: LanguageModelSpec, roots: Sequence[str] | None) -> None:
        assert spec.from_folder is not None
        assert spec.adapter is not None
        self._adapter = spec.adapter
        folder_catalog = catalog(HubFolder(spec.from_folder, roots))
        self._adapters, self._reader = adapters, TensorReader(folder_catalog.tensors, folder_catalog.files)
        self._pieces = fit(spec, folder_catalog).pieces
        is_double = any(tensor.entry.dtype == "F64" for tensor in folder_catalog.tensors.values())
        self._dtype = torch.float64 if is_double else torch.float32

    def read(self, name: str, region: Slices, dtype: torch.dtype | None = None) -> Tensor:
        if is_adapter(name) or self._adapter.saves(name):
            return self._adapters.read(name, region, dtype)
        block = torch.empty([end - first for first, end in region], dtype=dtype or self._dtype)
        fill_parameter(block, [first for first, _ in region], self._pieces[name], self._reader.read, skip_check)
        return block


@dataclass(frozen=True)
class LanguageModelExport:
    """Language model of a checkpoint, to be written in another tool's format."""

    spec: JobSpec
    model: LanguageModelSpec
    step: int
    source: TensorSource
    origin: Origin | None
    files: Mapping[str, bytes]
    """Tokenizer, chat template and generation config, as far as they are the job's own, by path."""
    is_adapter: bool
    """Whether the source has only the weights of an adapter, which was not merged."""


def open_checkpoint(
    checkpoint_folder: str,
    *,
    merge: bool = False,
    chat_template: bool = False,
    use_ema: bool = False,
    roots: Sequence[str] | None = None,
) -> LanguageModelExport:
    """Open a checkpoint's folder for export, with the options of `save_checkpoint_as_folder`.

    Verifies all files against the checkpoint's marker first. Raises CheckpointError if the checkpoint is not
    committed or holds another kind of model, SpecError.
    """
    parent, _, name = checkpoint_folder.rstrip("/").rpartition("/")
    checkpoints = Folder(parent or ".")
    step, checkpoint = verify_checkpoint(checkpoints, name).step, checkpoints.subfolder(name)
    spec = spec_of(checkpoint)
    if isinstance(spec.model, ModuleModelSpec):
        raise CheckpointError(module_checkpoint_error(checkpoint, spec.model))
    if not isinstance(spec.model, LanguageModelSpec):
        rule = f"has a {spec.model.kind} model; only language models have a Hugging Face format"
        raise CheckpointError(f"{checkpoint.url} {rule}: export it in the shardyard format")
    source: TensorSource = CheckpointSource(checkpoint, use_ema=use_ema)
    origin = _origin(checkpoint, spec.model, roots)
    files = {
        **_tokenizer(checkpoint),
        **_template(checkpoint, origin, chat_template),
        **_generation(checkpoint, origin),
    }
    if spec.model.adapter is None and merge:
        rule = "has no adapters to merge"
        raise CheckpointError(f"{checkpoint.url} {rule}: export without merging")
    if merge:
        if spec.model.keeps_frozen:
            base_digest(spec.model, roots, files_of(checkpoint))
            source = AdapterWithBaseSource(source, spec.model, roots)
        source = MergedSource(source, spec.model)
    is_adapter = spec.model.adapter is not None and not merge
    return LanguageModelExport(spec, spec.model, step, source, origin, files, is_adapter)


def save_checkpoint_as_folder(
    checkpoint_folder: str,
    target: str | Path,
    *,
    merge: bool = False,
    chat_template: bool = False,
    use_ema: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    roots: Sequence[str] | None = None,
) -> None:
    """Write the language model of a checkpoint's folder (`.../checkpoints/step-...`) as a Hugging Face folder.

    A LoRA adapter is written alone, in PEFT's format, or merged into all weights with `merge`. With `chat_template`,
    the job's chat template replaces the pretrained folder's. With `use_ema`, the average of the weights is written.

    Raises CheckpointError as `open_checkpoint` does, and SpecError as `save_folder` does.
    """
    export = open_checkpoint(checkpoint_folder, merge=merge, chat_template=chat_template, use_ema=use_ema, roots=roots)
    facts = _facts(export.spec, export.step)
    if export.is_adapter:
        save_adapter(export.model, export.source, target, origin=export.origin, files=export.files, facts=facts)
        return
    save_folder(
        export.model, export.source, target, origin=export.origin,
        dtype=_DTYPES.get(export.spec.train.dtype, torch.bfloat16), facts=facts, files=export.files,
        max_tokens=export.spec.data.max_tokens, max_shard_bytes=max_shard_bytes, roots=roots,
    )  # fmt: skip


def _origin(checkpoint: Folder, spec: LanguageModelSpec, roots: Sequence[str] | None) -> Origin | None:
    """Origin of the model, from the checkpoint or else from the pretrained folder."""
    if RECORD in checkpoint.names(TOKENIZERS):
        return Origin.of_files(lambda path: checkpoint.read(f"{TOKENIZERS}/{path}"))
    return None if spec.from_folder is None else Origin.of_folder(spec.from_folder, spec, roots)


def _tokenizer(checkpoint: Folder) -> dict[str, bytes]:
    name = "tokenizer.json"
    return {name: checkpoint.read(f"{TOKENIZERS}/{name}")} if name in checkpoint.names(TOKENIZERS) else {}


def _template(checkpoint: Folder, origin: Origin | None, is_requested: bool) -> dict[str, bytes]:
    """The job's chat template, if requested or if the pretrained folder has none."""
    if TRAINING_TEMPLATE not in checkpoint.names(TOKENIZERS):
        return {}
    return (
        {CHAT_TEMPLATE: checkpoint.read(f"{TOKENIZERS}/{TRAINING_TEMPLATE}")}
        if is_requested or not has_template({} if origin is None else origin.files)
        else {}
    )


def _generation(checkpoint: Folder, origin: Origin | None) -> dict[str, bytes]:
    """`generation_config.json`, with the tokens that ended answers in training added to its EOS tokens."""
    if origin is None or CLOSERS not in checkpoint.names(TOKENIZERS):
        return {}
    closing_ids = json.loads(checkpoint.read(f"{TOKENIZERS}/{CLOSERS}"))
    generation_config = json_object(origin.files, GENERATION)
    ends = generation_config.get("eos_token_id", origin.text_config.get("eos_token_id"))
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not (new_ids := [id for id in closing_ids if id not in ends]):
        return {}
    return {
        GENERATION: (json.dumps({**generation_config, "eos_token_id": [*ends, *new_ids]}, indent=2) + "\n").encode()
    }


def _facts(spec: JobSpec, step: int) -> dict[str, str]:
    """Facts for the model card, without local data paths."""
    data = spec.data.model_dump(mode="json", exclude_defaults=True)
    for data_source in (data, *data.get("sources", ())):
        if "paths" in data_source:
            data_source["paths"] = [path.rpartition("/")[2] for path in data_source["paths"]]
        if "chat_template" in data_source:
            data_source["chat_template"] = data_source["chat_template"].rpartition("/")[2]
    return {"name": spec.name, "Steps": f"{step:,} of {spec.train.num_steps:,}", "Data": json.dumps(data)}
