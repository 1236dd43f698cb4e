"""Targets, ranks and alphas in PEFT's `adapter_config.json`, whose patterns are regular expressions. No torch."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe.interchange.adapter_parts import AdapterPlace
from moe.spec import LanguageModelSpec, Problem, SpecError, spec_error

_MAX_PATTERNS = 10_000
_MAX_QUANTIFIERS = 3
_QUANTIFIER = re.compile(r"[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")


@dataclass(frozen=True)
class ScalePatterns:
    """Rank and alpha of each target of a config: `r` and `lora_alpha`, or those of the first expression in
    `rank_pattern` and `alpha_pattern` that matches the target's name or a suffix of it."""

    config: Mapping[str, Any]

    @classmethod
    def of_config(cls, config: Mapping[str, Any], config_path: str) -> "ScalePatterns":
        """Raises SpecError for values and expressions at `config_path` that are malformed or slow to match."""
        problems = [
            *_problems(config.get("rank_pattern"), f"{config_path}:rank_pattern", (int,)),
            *_problems(config.get("alpha_pattern"), f"{config_path}:alpha_pattern", (int, float)),
        ]
        if problems:
            raise SpecError(problems)
        return cls(config)

    def rank_of(self, place: AdapterPlace) -> int:
        return int(self._value("rank_pattern", "r", place))

    def alpha_of(self, place: AdapterPlace) -> float:
        return self._value("alpha_pattern", "lora_alpha", place)

    def of_experts(
        self, modules: Sequence[AdapterPlace], spec: LanguageModelSpec, config_path: str
    ) -> tuple[int, float]:
        """(rank, alpha) of a matrix of all experts that these modules of each make, with `{e}` for the expert: the sum
        of their ranks, and an alpha that keeps their scale. Raises SpecError if they differ."""
        assert spec.moe is not None
        places = [
            replace(place, module=place.module.replace("{e}", str(expert)))
            for place in modules for expert in range(spec.moe.num_experts)
        ]  # fmt: skip
        scales = {(self.rank_of(place), self.alpha_of(place)) for place in places}
        if len(scales) > 1:
            rule = f"means different ranks or alphas for {', '.join(place.module for place in modules)}"
            raise spec_error("unsupported", f"{config_path}:rank_pattern", self.config.get("rank_pattern"), rule,
                             "use an adapter with one rank and alpha for gates and ups of all experts")  # fmt: skip
        ((rank, alpha),) = scales
        number = len(modules)
        return number * rank, alpha * (number**0.5 if self.config.get("use_rslora") else number)

    def _value(self, key: str, default_key: str, place: AdapterPlace) -> float:
        is_module = place.parameter == "weight" and not names_target(self.config, place)
        target = place.module if is_module else place.target
        patterns: Mapping[str, float] = self.config.get(key) or {}
        default: float = self.config[default_key]
        return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", target)), default)


def names_target(config: Mapping[str, Any], place: AdapterPlace) -> bool:
    """Whether the config's `target_parameters` include this parameter, by its name or a suffix of it."""
    targets = config.get("target_parameters")
    ends = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
    return any(place.target == end or place.target.endswith(f".{end}") for end in ends)


def _problems(patterns: Any, path: str, kinds: tuple[type, ...]) -> Iterator[Problem]:
    if patterns is None:
        return
    if not isinstance(patterns, dict):
        yield Problem(
            "wrong_type", path, patterns, "must be an object of regular expressions and numbers", "correct it"
        )
        return
    if len(patterns) > _MAX_PATTERNS:
        rule = f"must have at most {_MAX_PATTERNS} entries"
        yield Problem("out_of_range", path, len(patterns), rule, "merge them into fewer expressions")
        return
    for expression, value in patterns.items():
        place = f"{path}.{expression}"
        if type(value) not in kinds or not value > 0:
            yield Problem("wrong_type", place, value, "must be a positive number", "correct it")
        if _REPEATED_GROUP.search(expression) or len(_QUANTIFIER.findall(expression)) > _MAX_QUANTIFIERS:
            rule = f"must not repeat a group, and must have at most {_MAX_QUANTIFIERS} of *, +, ? and {{}}"
            yield Problem("unsupported", place, value, rule, "write a simpler expression, or names of modules")
            continue
        try:
            re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            yield Problem("invalid_value", place, value, f"is not a regular expression ({error})", "correct it")
