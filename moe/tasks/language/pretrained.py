"""Pretrained model folder in the Hugging Face format: tokenizer, chat template, weights and adapter."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moe.data.conversations.template import ARGUMENTS, TRAINING_TEMPLATE
from moe.data.locations import Locator
from moe.data.sequences import ModelTokenizer
from moe.data.special_tokens import json_object
from moe.interchange.adapter_folder import AdapterFolder
from moe.interchange.catalog import family_in
from moe.interchange.config import build_config
from moe.interchange.hub_folder import MAX_CONFIG_BYTES, HubFolder
from moe.interchange.origin import RECORD, Origin
from moe.interchange.tokenizer import CONFIG, JSON, export_tokenizer, special_tokens
from moe.spec import ConversationsSpec, LanguageModelSpec, SequencesSpec, SpecError, spec_error

if TYPE_CHECKING:
    from moe.parallel import Layout
    from moe.tasks.language.model import LanguageModel

PLACE, ADAPTER_PLACE = "model.from", "adapter.from"
GENERATION = "generation_config.json"


def model_tokenizer(spec: LanguageModelSpec, roots: Sequence[str] | None, digest: str | None = None) -> ModelTokenizer:
    """Tokenizer of the pretrained folder with the files that an export needs, and the weight digest.

    Reads no weights. Raises SpecError.
    """
    assert spec.from_folder is not None
    origin = replace(Origin.of_folder(spec.from_folder, spec, roots), digest=digest)
    files = export_tokenizer(origin.files, PLACE)
    if JSON not in files:
        raise spec_error("not_found", PLACE, spec.from_folder, f"has no {JSON}, which defines its tokens",
                         "add the model's tokenizer")  # fmt: skip
    ends, begins = _ids_of(origin, "eos"), _ids_of(origin, "bos")
    if not ends:
        raise spec_error("missing", PLACE, spec.from_folder, "has no token that ends a text",
                         f"add eos_token_id to its config.json or {GENERATION}")  # fmt: skip
    return ModelTokenizer(
        {**origin.to_files(), JSON: files[JSON]}, ends[0], begins[0] if begins else None, tuple(ends[1:])
    )


def with_template(tokenizer: ModelTokenizer, data: SequencesSpec, roots: Sequence[str] | None) -> ModelTokenizer:
    """Tokenizer with a conversation job's own chat template and arguments. Raises SpecError."""
    if not isinstance(data, ConversationsSpec):
        return tokenizer
    files = dict(tokenizer.files)
    if data.chat_template is not None:
        files[TRAINING_TEMPLATE] = _template_file(data.chat_template, roots)
    if data.template_arguments:
        files[ARGUMENTS] = json.dumps(data.template_arguments, sort_keys=True).encode()
    return replace(tokenizer, files=files)


def _template_file(place: str, roots: Sequence[str] | None) -> bytes:
    path, remedy = "data.chat_template", "name one Jinja file, such as a folder's chat_template.jinja"
    locations = Locator(roots).locate(path, place)
    if len(locations) > 1:
        raise spec_error("invalid_value", path, place, f"names {len(locations)} files", remedy)
    try:
        with locations[0].open() as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except (OSError, EOFError) as error:
        raise spec_error("unreadable", path, place, f"cannot be read: {error}", remedy) from None
    if len(content) > MAX_CONFIG_BYTES:
        raise spec_error("too_large", path, place, f"has more than {MAX_CONFIG_BYTES:,} bytes", remedy)
    return content


def tokenizer_of_checkpoint(files: Mapping[str, bytes]) -> ModelTokenizer | None:
    """Tokenizer from a checkpoint, to resume without the pretrained folder; None if it has none."""
    return ModelTokenizer.of_files(files) if RECORD in files else None


def base_digest(spec: LanguageModelSpec, roots: Sequence[str] | None, checkpoint_files: Mapping[str, bytes]) -> str:
    """Digest of the folder's weights, which every attempt loads.

    Raises SpecError if it differs from the digest in `checkpoint_files`.
    """
    from moe.interchange.digest import digest_of

    assert spec.from_folder is not None
    digest = digest_of(spec.from_folder, roots)
    recorded_digest = Origin.of_files(checkpoint_files.__getitem__).digest if RECORD in checkpoint_files else None
    if recorded_digest not in (None, digest):
        rule = f"has weights with digest {digest}, but this job started from those with digest {recorded_digest}"
        raise spec_error("mismatch", PLACE, spec.from_folder, rule, "restore the folder that the job started from")
    return digest


def load(
    model: "LanguageModel", spec: LanguageModelSpec, layout: "Layout", roots: Sequence[str] | None, seed: int
) -> tuple[str, ...]:
    """Load the folder's weights into this rank's part of a model; return notes for the user. Collective.

    `seed` draws weights that upcycling adds. Raises SpecError on all ranks.
    """
    from moe.interchange.load import load_weights

    assert spec.from_folder is not None
    load_result = load_weights(spec.from_folder, model, spec, layout, roots=roots, seed=seed)
    return (f"starts from the weights of {spec.from_folder}", *load_result.notes)


def check_trained_adapter(spec: LanguageModelSpec, roots: Sequence[str] | None) -> None:
    """Raise SpecError unless the adapter folder to start from fits this model. Reads no weights."""
    if spec.adapter is None or spec.adapter.from_folder is None:
        return
    assert spec.from_folder is not None
    family = family_in(HubFolder(spec.from_folder, roots, PLACE))
    AdapterFolder(spec.adapter.from_folder, roots, ADAPTER_PLACE).parts(spec, family)


def load_trained_adapter(
    model: "LanguageModel", spec: LanguageModelSpec, layout: "Layout", roots: Sequence[str] | None
) -> tuple[str, ...]:
    """Load pretrained adapter weights into this rank's part of a model; return notes for the user. Collective.

    Raises SpecError on all ranks.
    """
    from moe.interchange.adapters import load_adapter

    if spec.adapter is None or (folder := spec.adapter.from_folder) is None:
        return ()
    load_adapter(folder, model, spec, layout, roots=roots, place=ADAPTER_PLACE)
    return (f"continues from the adapter of {folder}",)


def unknown_family_notes(spec: LanguageModelSpec) -> tuple[str, ...]:
    """Warning if the model cannot be exported in the Hugging Face format."""
    try:
        build_config(spec, None, "float32")
    except SpecError as error:
        _, nearest, *_ = error.problems
        rule = "matches no Hugging Face family, so it cannot be exported in their format"
        return (f"{rule}; nearest is {nearest.value}, which {nearest.rule}",)
    return ()


def _ids_of(origin: Origin, role: str) -> list[int]:
    """End-of-text (`eos`) or begin-of-text (`bos`) token ids; the first delimits documents. Raises SpecError.

    The first is from `config.json`, the others from `generation_config.json` or else `config.json`, as in
    transformers.
    """
    key = f"{role}_token_id"
    config_ids = _ids(origin.text_config.get(key), "config.json", key)
    generation_ids = _ids(json_object(origin.files, GENERATION).get(key), GENERATION, key)
    ids = [*config_ids[:1], *(generation_ids or config_ids)] or _special_token_ids(
        json_object(origin.files, CONFIG), role
    )
    return list(dict.fromkeys(ids))


def _ids(value: Any, file: str, key: str) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise spec_error("wrong_type", f"{PLACE}/{file}:{key}", value,
                         "must be a token id, or a list of token ids", f"correct {file}")  # fmt: skip
    return ids


def _special_token_ids(tokenizer_config: Mapping[str, Any], role: str) -> list[int]:
    """Ids of the token that `tokenizer_config.json` names for this role."""
    token = tokenizer_config.get(f"{role}_token")
    text = token.get("content") if isinstance(token, dict) else token
    ids = special_tokens(tokenizer_config)
    return [id for id, content in ids.items() if content == text]
