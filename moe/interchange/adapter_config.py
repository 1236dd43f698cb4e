"""Writing and checking of PEFT's `adapter_config.json`. No torch."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from moe.interchange.adapter_fields import field_problems
from moe.interchange.adapter_parts import SECOND, AdapterPlace
from moe.spec import Problem, ProblemCode
from moe.spec.adapter import AdapterSpec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
KIND = "LORA"
AGAIN = "use an adapter of this model, or describe that one in `adapter`"


def adapter_config(
    adapter: AdapterSpec,
    places: Mapping[str, AdapterPlace],
    tensors: Collection[str],
    base: str | None,
    *,
    saved_modules: Iterable[str] = (),
    token_ids: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    is_multimodal: bool = False,
) -> dict[str, Any]:
    """Config of an adapter of these matrices, by our names; `tensors` are the names of transformers' parameters.
    Dropout is 0 if PEFT wraps a parameter, where it refuses dropout. `saved_modules`: paths of modules trained whole;
    `token_ids`: tokens whose rows are trained, by path of the table's module.
    `is_multimodal`: whether the model has other parts, whose modules may have the same names, but in other modules of a
    layer."""
    modules = {place.target: place.path_in_layer for place in places.values() if place.parameter is None}
    parameters = {place.target: place.target_in_layer for place in places.values() if place.parameter is not None}
    paths = {path for name in tensors for path in accumulate(name.split("."), "{}.{}".format)}
    return {
        "peft_type": KIND, "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": adapter.rank, "lora_alpha": _plain(adapter.default_alpha),
        "rank_pattern": _pattern(places, adapter.rank_of, adapter.rank),
        "alpha_pattern": _pattern(places, adapter.alpha_of, adapter.default_alpha),
        "lora_dropout": 0.0 if parameters else adapter.dropout,
        "use_rslora": adapter.rank_stabilized, "init_lora_weights": True,
        "use_dora": adapter.dora, "bias": "none", "fan_in_fan_out": False,
        "target_modules": sorted(_shortest_suffixes(modules, paths, fewest=None if is_multimodal else 1)),
        "modules_to_save": sorted(path.rpartition(".")[2] for path in saved_modules) or None,
        "trainable_token_indices": _token_indices(token_ids),
        "target_parameters": _in_order(_shortest_suffixes(parameters, tensors)),
    }  # fmt: skip


def _token_indices(token_ids: Mapping[str, tuple[int, ...]]) -> dict[str, list[int]] | None:
    return {path.rpartition(".")[2]: list(ids) for path, ids in token_ids.items()} or None


def _plain(number: float) -> float:
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _pattern(places: Mapping[str, AdapterPlace], value_of: Callable[[str], float], default: float) -> dict[str, float]:
    """`rank_pattern` or `alpha_pattern`: values other than the default, by the shortest suffix that all targets of this
    value and no others have."""
    values = {place.target: value_of(name) for name, place in places.items()}
    in_layer = {place.target: place.target_in_layer for place in places.values()}
    patterns: dict[str, float] = {}
    for value in dict.fromkeys(values.values()):
        if value != default:
            targets = {target: in_layer[target] for target in values if values[target] == value}
            patterns |= dict.fromkeys(sorted(_shortest_suffixes(targets, values, fewest=1)), _plain(value))
    return patterns


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


def _in_order(names: set[str]) -> list[str]:
    """Sort names so that PEFT applies the outer of two wrappers last."""
    return sorted(names, key=lambda name: (name.rpartition(".")[0], name.endswith(SECOND)))


def misfits(
    config: Mapping[str, Any], adapter: AdapterSpec, scales: Mapping[str, tuple[int, float]], config_path: str
) -> Iterator[Problem]:
    """Yield the problems of a config, at `config_path`, that contradicts a model's adapter. `scales` are the config's
    (rank, alpha) of each matrix."""
    if adapter.groups or any(config.get(key) for key in ("rank_pattern", "alpha_pattern")):
        for name, in_config in scales.items():
            if in_config != (in_adapter := (adapter.rank_of(name), adapter.alpha_of(name))):
                key = "rank_pattern" if in_config[0] != in_adapter[0] else "alpha_pattern"
                rule = f"means (rank, alpha) {in_config} for {name}, which must have {in_adapter} here"
                yield Problem("mismatch", f"{config_path}:{key}", config.get(key), rule, AGAIN)
                break
    for key, value in {"peft_type": KIND, "r": adapter.rank, "lora_alpha": adapter.default_alpha}.items():
        code: ProblemCode = "unsupported" if key == "peft_type" else "mismatch"
        if key not in config:
            yield Problem("missing", f"{config_path}:{key}", None, "is missing", AGAIN)
        elif config[key] != value:
            yield Problem(code, f"{config_path}:{key}", config[key], f"must be {value!r} here", AGAIN)
    for key, flag in {"use_rslora": adapter.rank_stabilized, "use_dora": adapter.dora}.items():
        if bool(config.get(key)) != flag:
            yield Problem("mismatch", f"{config_path}:{key}", config.get(key), f"must be {flag!r} here", AGAIN)
    yield from field_problems(config, config_path, AGAIN)
