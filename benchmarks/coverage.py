"""Mixture types of the installed transformers, loaded or refused and why: `python -m benchmarks.coverage` writes
`results/coverage.json` and the table in docs/families.md.

A mixture type has a class that generates text and, in its config or that of a part, a number of routed experts. Its
default config is described, completed where the default is not a mixture or lacks a required key; no weights are read.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

from benchmarks import results
from moe.interchange.config import describe_config
from moe.spec import LanguageModelSpec, SpecError
from moe.spec.errors import in_words

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
MARKS = "<!-- coverage: written by benchmarks.coverage -->", "<!-- end of coverage -->"

_MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "MULTIMODAL_LM")
"""transformers' tables of classes that generate text."""
_NUM_EXPERTS = re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts")
_GEMMA4 = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
           "hidden_size_per_layer_input": 0}  # fmt: skip
_COMPLETED_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "doge": {"is_moe": True},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
_NO_DEFAULT = ("gemma4_assistant",)
"""Types whose config class has no valid default; none is a mixture."""
_CONFIG = "config.json"


def mixtures() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each mixture type with its config."""
    names = {name for mapping in _MAPPINGS for name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")}
    for name in sorted(names.difference(_NO_DEFAULT)):
        default = transformers.AutoConfig.for_model(name, **_COMPLETED_DEFAULTS.get(name, {}))
        config = json.loads(default.to_json_string(use_diff=False))
        if _has_experts(config):
            yield name, config


def _has_experts(config: Mapping[str, Any]) -> bool:
    return any(
        _NUM_EXPERTS.fullmatch(key) or (isinstance(value, dict) and _has_experts(value))
        for key, value in config.items()
    )


def refusal(config: Mapping[str, Any]) -> str | None:
    """Reason why a config is refused, if it is."""
    try:
        LanguageModelSpec(**describe_config(config, _CONFIG).model_fields)
    except SpecError as error:
        if [problem.path for problem in error.problems] == [f"{_CONFIG}:model_type"]:
            return error.problems[0].rule.removeprefix("is not a supported family; ")
        return in_words(error.problems, "; ")
    return None


def measure() -> dict[str, str | None]:
    """Reason of the refusal by mixture type; None if it loads."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return {name: refusal(config) for name, config in mixtures()}
    finally:
        transformers.logging.set_verbosity(level)


def table(reasons: Mapping[str, str | None]) -> str:
    """The types as Markdown."""
    loaded = [f"`{name}`" for name, reason in reasons.items() if reason is None]
    rows = [f"| `{name}` | {reason} |" for name, reason in reasons.items() if reason is not None]
    summary = (
        f"Of the {len(reasons)} mixture types of transformers {transformers.__version__}, {len(loaded)} load: "
        f"{', '.join(loaded)}. The others are refused:"
    )
    return "\n".join((fill(summary, 120, break_on_hyphens=False), "", "| `model_type` | |", "|---|---|", *rows))


def with_table(text: str, reasons: Mapping[str, str | None]) -> str:
    """A document with the table between its marks."""
    begin, end = map(re.escape, MARKS)
    pattern = f"(?<={begin}\n).*?(?={end})"
    document, count = re.subn(pattern, lambda _: f"\n{table(reasons)}\n\n", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"must hold {MARKS[0]} and {MARKS[1]} once")
    return document


def main() -> None:
    reasons = measure()
    PAGE.write_text(with_table(PAGE.read_text(), reasons))
    print(table(reasons))
    print(f"written to {results.write('coverage', reasons)} and {PAGE}")


if __name__ == "__main__":
    main()
