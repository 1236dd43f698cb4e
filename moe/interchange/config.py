"""Conversion between `config.json` and our spec, in both directions, by the families' tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moe.interchange.families import BY_ARCHITECTURE, BY_TYPE, FAMILIES, WRAPPED_FAMILIES
from moe.interchange.family import Family, Fields
from moe.interchange.ignored import BOOKKEEPING, FIXED_VALUES, GENERATION, REASONS, check_dropout, explain_ignored_keys
from moe.interchange.missing_features import TEXT_CONFIG, missing_features
from moe.interchange.quantization import Quantization, QuantizationFile, quantization_of
from moe.interchange.reading import Reading
from moe.interchange.rope import ROPE_KEYS, picture_positions
from moe.interchange.wrapper import TIES
from moe.spec import LanguageModelSpec, Problem, SpecError, spec_error
from moe.spec.errors import in_words
from moe.spec.language import GroupedQueryAttentionSpec, LinearAttentionSpec
from moe.spec.language.attention import MAX_LAYERS

_ONLY: dict[str, tuple[Any, ...]] = {
    "per_layer_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}
"""Keys of every family that must have one of these values."""

TRAINING_ONLY = (
    "preset", "from", "from_config", "ignored_keys", "moe.group_tokens", "moe.aux_coefficient", "moe.aux_scope",
    "moe.z_coefficient",
    "moe.input_jitter", "moe.bias_update_rate", "moe.drop_by", "moe.min_capacity",
    "moe.capacity_factor", "moe.training_choice", "attention.indexer.loss_coefficient", "attention.indexer.stage",
)  # fmt: skip
"""Spec fields that affect training, but not what the model computes."""

_UNKNOWN_KEY = "is not a known key of model_type {}"
_UNKNOWN_KEY_REMEDY = "if it does not change what the model computes, remove it from config.json"

_NOT_CARRIED = ("quantization_config", "auto_map")
"""Keys that exports omit: weights are written dequantized, and without code."""


@dataclass(frozen=True)
class ConfigDescription:
    """Contents of a `config.json`."""

    family: Family
    model_fields: dict[str, Any]
    """The model's fields in a job's spec."""
    keys: Mapping[str, tuple[str, ...]]
    """Config keys that each field was read from, by the field's path."""
    quantization: Quantization | None
    notes: tuple[str, ...]
    """Notes for the user."""
    ignored_keys: tuple[str, ...] = ()
    """Keys that do not affect the computation, each with the reason."""
    requests_router_loss: bool = False
    """Whether `output_router_logits` requests transformers' router loss, which is not implemented here."""


def describe_config(
    config: Mapping[str, Any], place: str, quantization_file: QuantizationFile | None = None
) -> ConfigDescription:
    """Return the model that a config describes. `place` is the file's name in errors. `quantization_file` applies if
    the config has no `quantization_config`. Raises SpecError with every unsupported value and unknown key."""
    family, whole_config = family_of(config, place), config
    config = family.text_config(whole_config)

    def path_of(key: str) -> str:
        return f"{place}:{family.key_path(whole_config, key)}"

    problems = list(_wrapper_problems(whole_config, family, place))
    reading = Reading(config, path_of, family.defaults, family.aliases)
    layers = reading.raw("num_hidden_layers")
    if isinstance(layers, int) and not 1 <= layers <= MAX_LAYERS:  # before building lists of layers
        raise spec_error("out_of_range", path_of("num_hidden_layers"), layers, f"must be from 1 to {MAX_LAYERS:,}",
                         "correct config.json")  # fmt: skip
    fields: Fields = {"kind": "language"}
    keys: dict[str, tuple[str, ...]] = {}
    for field in family.fields:
        field_values = field.read(reading)
        fields |= field_values
        for path in field_values:
            field_keys = set(field.keys_of(path))
            field_keys |= {alias for alias, key in family.aliases.items() if key in field_keys}
            keys[path] = tuple(family.key_path(whole_config, key) for key in config if key in field_keys)
    fixed_values = _fixed_values(family)
    activation, activation_value = family.activation
    for key, allowed_values in {**_ONLY, activation: (activation_value,), **fixed_values}.items():
        if key not in _ONLY or key not in _read(family):
            reading.only(key, allowed_values)
    check_dropout(reading)
    wants_router_loss = config.get("output_router_logits")
    reading.only("output_router_logits", (True, False))
    quantization, quantization_problems = quantization_of(
        config.get("quantization_config"), path_of("quantization_config"), family, quantization_file
    )
    problems += quantization_problems
    problems += reading.problems
    problems += [
        Problem(
            "unknown_key", path_of(key), config[key], _UNKNOWN_KEY.format(family.model_types[0]), _UNKNOWN_KEY_REMEDY
        )
        for key in sorted(config.keys() - known_keys(family))
        if config[key] is not None
    ]
    if problems:
        raise SpecError(problems)
    ignored_keys = tuple(explain_ignored_keys(config, _reasons(family)))
    if family.wrapper is not None:
        ignored_keys += tuple(explain_ignored_keys(whole_config, family.wrapper.reasons))
    return ConfigDescription(
        family,
        _nest(fields),
        keys,
        quantization,
        tuple(_notes(whole_config, quantization)),
        ignored_keys,
        bool(wants_router_loss) and "moe.router" in fields,
    )


def _wrapper_problems(config: Mapping[str, Any], family: Family, place: str) -> Iterator[Problem]:
    """Yield problems with a wrapper's own keys."""
    if (wrapper := family.wrapper) is None:
        return
    reading = Reading(config, lambda key: f"{place}:{key}", {}, {})
    for key, allowed_values in {**_ONLY, **wrapper.only}.items():
        reading.only(key, allowed_values)
    yield from reading.problems
    for key in sorted(config.keys() - wrapper.keys - _ONLY.keys() - BOOKKEEPING - GENERATION):
        if config[key] is not None:
            rule = _UNKNOWN_KEY.format(wrapper.model_type)
            yield Problem("unknown_key", f"{place}:{key}", config[key], rule, _UNKNOWN_KEY_REMEDY)


def known_keys(family: Family) -> set[str]:
    """Keys of a family's config that are read, restricted to some values, or ignored."""
    free = BOOKKEEPING | GENERATION | _reasons(family).keys()
    return _read(family) | _ONLY.keys() | _fixed_values(family).keys() | {family.activation[0]} | free


def _reasons(family: Family) -> dict[str, str]:
    """Ignored keys of a family, each with the reason."""
    read = _read(family)
    return {key: reason for key, reason in {**REASONS, **family.unused_keys}.items() if key not in read}


def _read(family: Family) -> set[str]:
    """Keys of a family that fields are read from."""
    return {key for field in family.fields for key in field.keys} | family.aliases.keys()


def _fixed_values(family: Family) -> dict[str, tuple[Any, ...]]:
    """Keys that must have these values, which hold for all models of the family."""
    read = _read(family)
    return {key: allowed_values for key, allowed_values in FIXED_VALUES.items() if key not in read} | dict(family.only)


def family_of(config: Mapping[str, Any], place: str) -> Family:
    """Family of a config. `place` is the file's name in errors. Raises SpecError."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in BY_TYPE:
        architectures = config.get("architectures")
        for (shared_type, architecture), family in BY_ARCHITECTURE.items():
            if kind == shared_type and architectures == [architecture]:
                return family
        return BY_TYPE[kind]
    if isinstance(kind, str) and kind in WRAPPED_FAMILIES:
        return _wrapped_family(config, WRAPPED_FAMILIES[kind], place)
    remedy = "use a model of a family in docs/families.md"
    raise spec_error("unsupported", f"{place}:model_type", kind, f"is not a supported family{_reason(config)}", remedy)


def _wrapped_family(config: Mapping[str, Any], families: Mapping[str, Family], place: str) -> Family:
    """Family of a wrapper's config, by that of its language model. Raises SpecError."""
    wrapper = next(iter(families.values())).wrapper
    assert wrapper is not None
    text_config, path = config.get(wrapper.text_key), f"{place}:{wrapper.text_key}"
    if text_config is None:
        raise spec_error("missing", path, None, "is required", "add the language model's config to config.json")
    if not isinstance(text_config, dict):
        raise spec_error("wrong_type", path, text_config, "must be an object", "correct config.json")
    kind = text_config.get("model_type", wrapper.text_type)
    if isinstance(kind, str) and kind in families:
        return families[kind]
    remedy = "use a model whose language model is of a family in docs/families.md"
    reason = _reason(text_config) if str(kind) not in BY_TYPE else ""
    rule = f"is not a supported language model of a {wrapper.model_type}{reason}"
    raise spec_error("unsupported", f"{path}.model_type", kind, rule, remedy)


def _reason(config: Mapping[str, Any]) -> str:
    """Reason why a config of an unknown family is unsupported: its missing features, or else the nearest family."""
    if features := list(missing_features(config)):
        return f"; missing here: {', '.join(features)}"
    text = config.get(TEXT_CONFIG)
    keys = {key for key, value in (text if isinstance(text, dict) else config).items() if value is not None}
    keys -= BOOKKEEPING | GENERATION | REASONS.keys()
    family = min(FAMILIES, key=lambda family: (len(keys - known_keys(family)), len(keys ^ _read(family))))
    if not keys & _read(family):
        return ""
    unknown_keys = ", ".join(f"`{key}`" for key in sorted(keys - known_keys(family)))
    difference = f", which has no {unknown_keys}" if unknown_keys else ""
    return f"; its keys show no missing feature; the nearest family is {family.model_types[0]}{difference}"


def _notes(config: Mapping[str, Any], quantization: Quantization | None) -> Iterator[str]:
    if quantization is not None:
        yield from quantization.notes
    if config.get("auto_map"):
        yield (
            "auto_map names Python code in the folder, which is never run: this library's model of this type is used"
        )


def _nest(fields: Fields) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in fields.items():
        *parts, name = path.split(".")
        branch = tree
        for part in parts:
            branch = branch.setdefault(part, {})
        if value is not None:
            branch[name] = value
    return tree


def meaning(spec: LanguageModelSpec) -> dict[str, Any]:
    """Flat description of what a model computes: equal for specs that compute the same function."""
    fields = dict(_flat(_with_router_defaults(spec).model_dump(mode="json", exclude={"adapter", "upcycle"})))
    for path in TRAINING_ONLY:
        fields.pop(path, None)
    for path in ("moe_every", "first_dense_layers", "dense_layers", "full_attention_every",
                 "attention_layers", "feed_forward_layers", "local_layers", "attention.windowed_layers",
                 "attention.window", "local_attention.windowed_layers", "local_attention.window"):  # fmt: skip
        fields.pop(path, None)
    layers = range(spec.num_layers)
    fields["layers with experts"] = list(spec.moe_layers)
    fields["layers with full attention"] = [layer for layer in layers if spec.has_full_attention(layer)]
    fields["windows of layers"] = [spec.window_of(layer) for layer in layers]
    fields["layers with local attention"] = [layer for layer in layers if spec.has_local_attention(layer)]
    fields["attention.scale"] = spec.attention.score_scale
    if spec.local_attention is not None:
        fields["local_attention.scale"] = spec.local_attention.score_scale
    for name, attention in (("attention", spec.attention), ("local_attention", spec.local_attention)):
        if isinstance(attention, GroupedQueryAttentionSpec):
            fields[f"{name}.value_dim"] = attention.value_head_dim
    fields["layers with a feed-forward layer"] = [layer for layer in layers if spec.has_feed_forward(layer)]
    if not spec.dense_ffn_layers:
        fields.pop("ffn_dim", None)
        fields.pop("ffn_activation", None)
    if not any(isinstance(spec.attention_of(layer), LinearAttentionSpec) for layer in layers):
        fields = {path: value for path, value in fields.items() if not path.startswith("linear_attention")}
    if spec.moe is not None:
        fields["moe.selection_bias"] = spec.moe.routing.has_selection_bias
        if spec.moe.routing.max_expert_groups is None:
            fields.pop("moe.expert_groups_per_token", None)
        if fields.get("moe.softmax") == "after_topk" and not fields["moe.selection_bias"]:
            fields["moe.softmax"] = "before_topk"  # equivalent, since weights are divided by their sum
    return {path: value for path, value in fields.items() if value is not None}


def _with_router_defaults(spec: LanguageModelSpec) -> LanguageModelSpec:
    """The model with its router's defaults written out."""
    if spec.moe is None:
        return spec
    routing = spec.moe.resolved.routing
    if getattr(routing, "softmax", None) == "after_topk":
        routing = routing.model_copy(update={"renormalize_gates": True})
    return spec.model_copy(update={"moe": spec.moe.model_copy(update={"routing": routing})})


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def build_config(spec: LanguageModelSpec, origin_config: Mapping[str, Any] | None, dtype: str) -> dict[str, Any]:
    """Config of a model: its folder's config, updated, or else a new config of the first family that can represent the
    model. Weights are written in `dtype`.

    Raises SpecError, with what each family cannot represent, if no family can.
    """
    if origin_config is not None:
        return _update_origin(spec, origin_config, dtype)
    reasons = []
    for family in FAMILIES:
        config = new_config(spec, family, dtype)
        difference_texts = list(differences(spec, config))
        if not difference_texts:
            return config
        has_same_kind = (spec.moe is None) == (not any(path.startswith("moe.") for path in _fields_of(family)))
        problem = Problem(
            "unsupported", "model", family.model_types[0], f"cannot express the model: {'; '.join(difference_texts)}"
        )
        reasons.append((not has_same_kind, len(difference_texts), problem))
    nearest = [problem for _, _, problem in sorted(reasons, key=lambda reason: reason[:2])]
    raise SpecError(
        [
            Problem(
                "unsupported",
                "model",
                None,
                "matches no supported Hugging Face family, so it cannot be exported in their format",
                "change what the nearest family cannot express, or export in the shardyard format",
            ),
            *nearest,
        ]
    )


def _fields_of(family: Family) -> set[str]:
    reading = _reading(family, {})
    return {path for field in family.fields for path in field.read(reading)}


def new_config(spec: LanguageModelSpec, family: Family, dtype: str) -> dict[str, Any]:
    """New config of a family, with everything of the model that the family can express."""
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_types[0]}
    for field in family.fields:
        config |= field.write(_with_router_defaults(spec))
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config |= dict([family.activation])
    return _for_any_release({**config, **family.new_config_keys, **tokens}, spec, family, dtype)


def differences(spec: LanguageModelSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between a spec and the model of a config."""
    try:
        config_meaning = meaning(LanguageModelSpec(**describe_config(config, "config.json").model_fields))
    except SpecError as error:
        yield in_words(error.problems, "; ")
        return
    spec_meaning = meaning(spec)
    for path in sorted(spec_meaning.keys() | config_meaning.keys()):
        if spec_meaning.get(path) != config_meaning.get(path):
            yield f"{path} (={spec_meaning.get(path)!r}) would be {config_meaning.get(path)!r}"


def _reading(family: Family, config: Mapping[str, Any]) -> Reading:
    return Reading(config, lambda key: f"config.json:{key}", family.defaults, family.aliases)


def _update_origin(spec: LanguageModelSpec, origin_config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    family = family_of(origin_config, "config.json")
    text_family = family.text_family or family
    config = _without_aliases(family.text_config(origin_config), family)
    config = {key: value for key, value in config.items() if key not in _NOT_CARRIED}
    config["model_type"] = text_family.model_types[0]  # the type that transformers loads without remote code
    if list(_text_differences(spec, config, family)):
        config = _change_config(spec, config, family)
    if difference_texts := list(_text_differences(spec, config, family)):
        rule = f"can no longer be expressed as {family.model_types[0]}: {'; '.join(difference_texts)}"
        raise spec_error("unsupported", "model", None, rule, "remove the fields next to `from`")
    config = _for_any_release(config, spec, family, dtype)
    if family.wrapper is None:
        return config
    outer_config = {key: value for key, value in origin_config.items() if key not in _NOT_CARRIED}
    return {**family.wrapper.with_text_config(outer_config, config), "dtype": dtype, "torch_dtype": dtype}


def _without_aliases(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Config with the keys that all releases of transformers know, instead of their aliases."""
    keys = {key: value for key, value in config.items() if key not in family.aliases}
    return keys | {key: config[alias] for alias, key in family.aliases.items() if config.get(alias) is not None}


def _text_differences(spec: LanguageModelSpec, config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Like `differences`, with the config of a language model alone, also if it is part of a wrapper."""
    wrapper = family.wrapper
    if wrapper is not None:
        config = {"model_type": wrapper.model_type, wrapper.text_key: config, TIES: config.get(TIES)}
    yield from differences(spec, config)


def _change_config(spec: LanguageModelSpec, config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Config with the keys changed whose meaning differs from the spec's; others keep their notation."""
    config = dict(config)
    for field in family.fields:
        new = field.write(_with_router_defaults(spec))
        if field.read(_reading(family, config)) == field.read(_reading(family, {**config, **new})):
            continue
        changes = dict(new)
        if "rope_parameters" in changes:
            longest = config.get("max_position_embeddings", changes["max_position_embeddings"])
            original_parameters = config.get("rope_scaling") or config.get("rope_parameters")
            positions = picture_positions(original_parameters)
            changes |= {key: {**changes[key], **positions} for key in ROPE_KEYS if changes.get(key)}
            rope_keys = field.keys_of("attention.rope")
            config = {key: value for key, value in config.items() if key not in rope_keys}
            changes["max_position_embeddings"] = longest
        config |= changes
    return config


def _for_any_release(config: Mapping[str, Any], spec: LanguageModelSpec, family: Family, dtype: str) -> dict[str, Any]:
    """Config that transformers 4, transformers 5 and vLLM interpret in the same way: with RoPE in both forms, and keys
    that a reader would misinterpret if missing."""
    full_config = {**family.constant_keys, **config}
    for field in family.fields:
        full_config |= field.older(spec, config)
    return {**full_config, "dtype": dtype, "torch_dtype": dtype}
