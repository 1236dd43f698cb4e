"""Writing and checking of PEFT's `adapter_config.json`. No torch."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from moe.interchange.adapter_parts import SECOND, AdapterPlace
from moe.spec import Problem, ProblemCode
from moe.spec.adapter import AdapterSpec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
KIND = "LORA"
AGAIN = "use an adapter of this model, or describe that one in `adapter`"
_DEFAULTS: Mapping[str, Any] = {
    "bias": "none", "fan_in_fan_out": False, "use_dora": False, "modules_to_save": None, "layers_to_transform": None,
    "layers_pattern": None, "rank_pattern": {}, "alpha_pattern": {}, "lora_bias": False, "megatron_config": None,
    "trainable_token_indices": None, "layer_replication": None, "alora_invocation_tokens": None, "use_qalora": False,
    "velora_config": None, "kasa_config": None, "arrow_config": None, "corda_config": None, "eva_config": None,
    "use_bdlora": None, "monteclora_config": None,
}  # fmt: skip
"""Keys that must have these values or be empty; other values change what the adapter computes."""
_INIT_LORA_WEIGHTS = (None, True, False, "gaussian", "orthogonal")


def adapter_config(
    adapter: AdapterSpec,
    places: Iterable[AdapterPlace],
    tensors: Collection[str],
    base: str | None,
    *,
    is_part: bool = False,
) -> dict[str, Any]:
    """Config of an adapter of these matrices; `tensors` are the names of transformers' parameters. Dropout is 0 if PEFT
    wraps a parameter, where it refuses dropout. `is_part`: whether the model has other parts, whose modules may have
    the same names, but in other modules of a layer."""
    alpha = alpha_of(adapter)
    places = dict.fromkeys(places)
    modules = {place.target: place.path_in_layer for place in places if place.parameter is None}
    parameters = {place.target: place.target_in_layer for place in places if place.parameter is not None}
    paths = {path for name in tensors for path in accumulate(name.split("."), "{}.{}".format)}
    return {
        "peft_type": KIND, "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": adapter.rank, "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0 if parameters else adapter.dropout,
        "use_rslora": adapter.rank_stabilized, "init_lora_weights": True,
        **{key: value for key, value in _DEFAULTS.items() if key in ("bias", "fan_in_fan_out", "use_dora")},
        "target_modules": sorted(_shortest_suffixes(modules, paths, fewest=None if is_part else 1)),
        "target_parameters": _in_order(_shortest_suffixes(parameters, tensors)),
    }  # fmt: skip


def alpha_of(adapter: AdapterSpec) -> float:
    return float(adapter.rank) if adapter.alpha is None else adapter.alpha


def _shortest_suffixes(targets: Mapping[str, str], all_names: Collection[str], fewest: int | None = None) -> set[str]:
    """Shortest suffixes that match all `targets` and no other name in `all_names`, as PEFT matches names.

    `targets` maps each full name to its name within its layer. A suffix has at least `fewest` parts of the name within
    the layer (all if None). If every such suffix also matches a name that is not a target, the full name is used.
    """
    is_exact: dict[str, bool] = {}

    def matches_only_targets(end: str) -> bool:
        if end not in is_exact:
            matching_names = (name for name in all_names if name == end or name.endswith(f".{end}"))
            is_exact[end] = all(name in targets for name in matching_names)
        return is_exact[end]

    suffixes = set()
    for name, path_in_layer in targets.items():
        parts = path_in_layer.split(".")
        ends = (".".join(parts[-number:]) for number in range(fewest or len(parts), len(parts) + 1))
        suffixes.add(next(filter(matches_only_targets, ends), name))
    return suffixes


def names_target(config: Mapping[str, Any], place: AdapterPlace) -> bool:
    """Whether the config's `target_parameters` include this parameter, by its name or a suffix of it."""
    targets = config.get("target_parameters")
    ends = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
    return any(place.target == end or place.target.endswith(f".{end}") for end in ends)


def _in_order(names: set[str]) -> list[str]:
    """Sort names so that PEFT applies the outer of two wrappers last."""
    return sorted(names, key=lambda name: (name.rpartition(".")[0], name.endswith(SECOND)))


def misfits(config: Mapping[str, Any], adapter: AdapterSpec, config_path: str) -> Iterator[Problem]:
    """Yield the problems of a config, at `config_path`, that contradicts a model's adapter."""
    for key, value in {"peft_type": KIND, "r": adapter.rank, "lora_alpha": alpha_of(adapter)}.items():
        code: ProblemCode = "unsupported" if key == "peft_type" else "mismatch"
        if key not in config:
            yield Problem("missing", f"{config_path}:{key}", None, "is missing", AGAIN)
        elif config[key] != value:
            yield Problem(code, f"{config_path}:{key}", config[key], f"must be {value!r} here", AGAIN)
    for key, value in {**_DEFAULTS, "use_rslora": adapter.rank_stabilized}.items():
        config_value = config.get(key)
        if config_value is not None and config_value != value and (config_value or value):
            code = "mismatch" if key == "use_rslora" else "unsupported"
            yield Problem(code, f"{config_path}:{key}", config_value, f"must be {value!r} here", AGAIN)
    if (init := config.get("init_lora_weights")) not in _INIT_LORA_WEIGHTS:
        yield Problem("unsupported", f"{config_path}:init_lora_weights", init, "changes the base weights",
                      "convert it to a plain adapter, as PEFT can when saving")  # fmt: skip
