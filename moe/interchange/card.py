"""Model cards of exports, in the Hugging Face hub's format."""

from collections.abc import Mapping

from moe.interchange.family import Family
from moe.interchange.origin import Origin
from moe.interchange.releases import adapter_readers, readers
from moe.spec import LanguageModelSpec


def model_card(spec: LanguageModelSpec, facts: Mapping[str, str], origin: Origin | None, family: Family) -> str:
    """`README.md` of a model: dimensions, training facts, and what can load it."""
    lines = [
        *_head("transformers", facts.get("name", "A language model")),
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
    parameters = bool(config["target_parameters"])
    lines = [
        *_head("peft", facts.get("name", "An adapter of a language model"), "lora"),
        f"- Base: {_starting_point(origin)}",
        f"- Rank: {spec.adapter.rank}, alpha {spec.adapter.default_alpha:g}, on {', '.join(targets)}",
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
        f"- Loads in: {adapter_readers(spec, family, parameters)}",
    ]
    return _text(lines, facts)


def _head(library: str, name: str, *tags: str) -> list[str]:
    hub_metadata = [f"library_name: {library}", "pipeline_tag: text-generation", *(f"tags: [{tag}]" for tag in tags)]
    return ["---", *hub_metadata, "---", "", f"# {name}", "", "Trained with Shardyard.", ""]


def _starting_point(origin: Origin | None) -> str:
    return "random weights" if origin is None else f"the weights of `{origin.url.rpartition('/')[2]}`"


def _list(names: object) -> list[object]:
    return list(names) if isinstance(names, list) else []


def _text(lines: list[str], facts: Mapping[str, str]) -> str:
    fact_lines = [f"- {key}: {value}" for key, value in facts.items() if key != "name"]
    return "\n".join([*lines, *fact_lines]) + "\n"
