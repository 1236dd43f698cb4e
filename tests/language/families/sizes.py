"""Random fields that configs of many families have."""

from random import Random
from typing import Any


def base(random: Random, **overrides: Any) -> dict[str, Any]:
    """Sizes that nothing divides evenly. Families that are published with a padding token have one."""
    return {
        "vocab_size": random.randint(20, 60), "hidden_size": 4 * random.randint(3, 10),
        "num_hidden_layers": random.randint(1, 3), "max_position_embeddings": 64,
        "tie_word_embeddings": random.random() < 0.3, "rms_norm_eps": random.choice([1e-6, 1e-5, 1e-3]),
        "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **overrides,
    }  # fmt: skip


def head_sizes(random: Random, *, head_dim: bool = True) -> dict[str, Any]:
    """Heads that have a width of their own, or share the model's."""
    kv_heads, groups = random.randint(1, 3), random.randint(1, 3)
    heads = kv_heads * groups
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads,
             "hidden_size": heads * 2 * random.randint(2, 5)}  # fmt: skip
    return {**sizes, "head_dim": 2 * random.randint(2, 6)} if head_dim else sizes


SPARSE: list[dict[str, Any]] = [
    {"decoder_sparse_step": 1, "mlp_only_layers": []}, {"decoder_sparse_step": 2, "mlp_only_layers": []},
    {"decoder_sparse_step": 1, "mlp_only_layers": [0]},
]  # fmt: skip
"""Layers with experts: at least one of two."""


def expert_counts(random: Random) -> tuple[int, int]:
    """(E, K)"""
    number = random.randint(3, 9)
    return number, random.randint(1, min(4, number))


def rope_fields(random: Random, partial: float | None = None) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0,
         "beta_slow": 1.0, "truncate": random.choice((True, False, None))},
    ]  # fmt: skip
    parameters = {**random.choice(kinds), "rope_theta": random.choice([100.0, 1e4, 1e6])}
    if partial is not None:
        parameters["partial_rotary_factor"] = partial
    return {"rope_parameters": parameters}


def random_layer_types(random: Random) -> list[str]:
    """Of three layers, at least one with experts."""
    types = ["sparse", *random.choices(["sparse", "dense"], k=2)]
    random.shuffle(types)
    return types


def local_rope_fields(random: Random, fraction: float | None = None) -> dict[str, Any]:
    """RoPE of each type of layers. transformers scales both dynamically by the longest row, and differently."""
    parameters = {}
    for layer_type in ("full_attention", "sliding_attention"):
        (parameters[layer_type],) = rope_fields(random, fraction).values()
        if parameters[layer_type]["rope_type"] == "dynamic":
            parameters[layer_type]["rope_type"] = "linear"
        if parameters[layer_type]["rope_type"] == "yarn":
            parameters[layer_type]["truncate"] = True
    return {"rope_parameters": parameters}
