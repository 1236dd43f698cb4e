"""Model cards of exports, in the Hugging Face hub's format."""

import json
import re
from collections.abc import Mapping

from moe.interchange.family import Family
from moe.interchange.origin import Origin
from moe.interchange.releases import adapter_readers, readers
from moe.spec import LanguageModelSpec

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_CACHED = re.compile(r"/models--([\w.-]+--[\w.-]+)/snapshots/")
_PLAIN = re.compile(r"[a-z][a-z-]*")


def model_card(spec: LanguageModelSpec, facts: Mapping[str, str], origin: Origin | None, family: Family) -> str:
    """`README.md` of a model: dimensions, training facts, and what can load it."""
    lines = [
        *_head(facts.get("name", "A language model"), library_name="transformers", pipeline_tag="text-generation"),
        f"- Started from: {_starting_point(origin)}",
        (f"- Parameters: {spec.num_parameters():,}, {spec.num_active_parameters():,} active per token"),
        f"- Layers: {spec.num_layers}, model dimension {spec.model_dim}",
    ]
    if spec.moe is not None:
        lines.append(f"- Experts: {spec.moe.num_experts} in each of {len(spec.moe_layers)} layers, "
f"{spec.moe.experts_per_token} per token")  # fmt: skip
    if origin is not None and origin.untrained_names:
        parts = f"{'' if family.wrapper is None else 'other parts and '}multi-token-prediction heads"
        lines.append(f"- Not trained, unchanged: {len(origin.untrained_names)} tensors of {parts}")
    return _text([*lines, f"- Loads in: {readers(spec, family)}"], facts)


def adapter_card(
    spec: LanguageModelSpec,
    facts: Mapping[str, str],
    origin: Origin | None,
    family: Family,
    config: Mapping[str, object],
) -> str:
    """`README.md` of an adapter with this `adapter_config.json`."""
    assert spec.adapter is not None
    targets = [str(name) for key in ("target_modules", "target_parameters") for name in _list(config[key])]
    parameters, token_ids = bool(config["target_parameters"]), config["trainable_token_indices"]
    rows = token_ids if isinstance(token_ids, dict) else {}
    lines = [
        *_adapter_head(facts.get("name", "An adapter of a language model"), origin),
        f"- Base: {_starting_point(origin)}",
        f"- {'DoRA, rank' if spec.adapter.dora else 'Rank'}: {spec.adapter.rank}, "
        f"alpha {spec.adapter.default_alpha:g}, on {', '.join(targets)}",
        *(
            f"- Other {title}: {', '.join(f'{value:g} on {name}' for name, value in patterns.items())}"
            for title, patterns in (("ranks", config["rank_pattern"]), ("alphas", config["alpha_pattern"]))
            if isinstance(patterns, dict) and patterns
        ),
        *(
            [f"- Trained whole: {', '.join(map(str, modules))}"]
            if (modules := _list(config["modules_to_save"]))
            else []
        ),
        *(f"- Trained rows: {len(ids)} of {name}" for name, ids in rows.items()),
        f"- Loads in: {adapter_readers(spec, family, parameters)}",
    ]
    return _text(lines, facts)


def _adapter_head(name: str, origin: Origin | None) -> list[str]:
    """Metadata as PEFT writes it: the hub lists the adapter under its base."""
    tags, base = ["lora", "transformers"], None if origin is None else _base_name(origin)
    if base is None:
        return _head(name, library_name="peft", pipeline_tag="text-generation", tags=tags)
    tags = [f"base_model:adapter:{base}", *tags]
    return _head(name, base_model=base, library_name="peft", pipeline_tag="text-generation", tags=tags)


def _base_name(origin: Origin) -> str:
    """Name of the base on the hub, from its config or its place in the hub's cache, or else its folder's name."""
    recorded_name = origin.config.get("_name_or_path")
    if isinstance(recorded_name, str) and _HUB_NAME.fullmatch(recorded_name):
        return recorded_name
    if (match := _CACHED.search(origin.url)) is not None:
        return match[1].replace("--", "/", 1)
    return origin.url.rpartition("/")[2]


def _head(name: str, **metadata: object) -> list[str]:
    """Title after the metadata, whose values are JSON, which YAML includes."""
    lines = (f"{key}: {_yaml(value)}" for key, value in metadata.items())
    return ["---", *lines, "---", "", f"# {name}", "", "Trained with Shardyard.", ""]


def _yaml(value: object) -> str:
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else json.dumps(value)


def _starting_point(origin: Origin | None) -> str:
    return "random weights" if origin is None else f"the weights of `{origin.url.rpartition('/')[2]}`"


def _list(names: object) -> list[object]:
    return list(names) if isinstance(names, list) else []


def _text(lines: list[str], facts: Mapping[str, str]) -> str:
    fact_lines = [f"- {key}: {value}" for key, value in facts.items() if key != "name"]
    return "\n".join([*lines, *fact_lines]) + "\n"
