"""Fields of PEFT's `LoraConfig`, and of `adapter_config.json` in its releases: obeyed, without effect on a trained
adapter, or refused. `docs/adapters.md` has the same table. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from moe.spec import Problem

OBEYED: Mapping[str, str] = {
    "peft_type": "must be LORA", "r": "`rank`", "lora_alpha": "`alpha`", "use_rslora": "`rank_stabilized`",
    "rank_pattern": "`groups`", "alpha_pattern": "`groups`", "use_dora": "`dora`", "lora_dropout": "`dropout`",
    "modules_to_save": "`modules_to_save`: `embed_tokens`, `lm_head`",
    "trainable_token_indices": "`trainable_token_indices`: rows of `embed_tokens`, `lm_head`",
    "target_parameters": "which of the experts' two matrices a wrapper belongs to, and which pattern applies",
    "init_lora_weights": "true, false, `gaussian`, `orthogonal` and `eva` leave the base as it is; others are refused",
}  # fmt: skip
"""Meaning of each field here."""

IRRELEVANT: Mapping[str, str] = {
    **dict.fromkeys(
        ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        "the tensors show which matrices have an adapter",
    ),
    **dict.fromkeys(
        ("base_model_name_or_path", "revision"), "the base is `model.from`, whose shapes must fit the adapter's"
    ),
    **dict.fromkeys(
        ("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        "settings of an initialization, which `init_lora_weights` names",
    ),
    **dict.fromkeys(("task_type", "auto_mapping", "peft_version", "inference_mode"), "how PEFT loads it"),
    "ensure_weight_tying": "only for adapters of tied embeddings, which are refused; tied token rows always are tied",
    "megatron_core": "only with `megatron_config`", "qalora_group_size": "only with `use_qalora`",
    "runtime_config": "where PEFT computes; never saved", "merge_weights": "removed from PEFT; when to merge",
}  # fmt: skip
"""Reason why each field does not change what a trained adapter computes."""

REFUSED: Mapping[str, tuple[Any, str]] = {
    "bias": ("none", "trains biases of the base, which stay frozen here"),
    "fan_in_fan_out": (False, "transposes the weight, as for GPT-2's Conv1D, which no family here has"),
    "lora_bias": (False, "adds a bias to B, for weights extracted from a tuned model"),
    "layer_replication": (None, "repeats layers of the base"),
    "megatron_config": (None, "belongs to Megatron's parallel layers"),
    "alora_invocation_tokens": (None, "applies the adapter only after these tokens"),
    "use_qalora": (False, "pools the inputs of A by group"),
    "velora_config": (None, "compresses the inputs of A that are saved for its gradient"),
    "kasa_config": (None, "truncates the base's weights and adds a diagonal between A and B"),
    "arrow_config": (None, "routes tokens among several adapters"),
    "use_bdlora": (None, "makes A or B block-diagonal"),
    "monteclora_config": (None, "samples the adapter's weights"),
}  # fmt: skip
"""Only accepted value of each field besides null, and what other values do."""

_UNCHANGED_BASE = (None, True, False, "gaussian", "orthogonal", "eva")
"""Initializations that leave the base's weights unchanged and train A and B."""


def field_problems(config: Mapping[str, Any], config_path: str, remedy: str) -> Iterator[Problem]:
    """Yield the problems of a config's fields that are refused or unknown."""
    for key, (accepted, effect) in REFUSED.items():
        value = config.get(key)
        if value is not None and value != accepted and (value or accepted):
            yield Problem(
                "unsupported", f"{config_path}:{key}", value, f"must be {accepted!r} here: it {effect}", remedy
            )
    for key, value in config.items():
        if value and key not in {*REFUSED, *IRRELEVANT, *OBEYED}:
            yield Problem("unknown_key", f"{config_path}:{key}", value, "is not a known key of a LoRA adapter's config",
                          "remove it if it has no effect on the adapter")  # fmt: skip
    if (init := config.get("init_lora_weights")) not in _UNCHANGED_BASE:
        effect = "freezes B" if init == "mica" else "changes the base weights"
        yield Problem("unsupported", f"{config_path}:init_lora_weights", init, effect,
                      "convert it to a plain adapter, as PEFT can when saving")  # fmt: skip
