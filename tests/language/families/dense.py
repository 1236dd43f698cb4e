"""Dense families, and Gemma."""

from random import Random
from typing import Any

from tests.language.families.sizes import base, expert_counts, head_sizes, local_rope_fields, rope_fields


def llama(random: Random) -> dict[str, Any]:
    return {
        "model_type": "llama", **base(random), **head_sizes(random), **rope_fields(random),
        "intermediate_size": random.randint(3, 20), "attention_bias": random.random() < 0.5,
    }  # fmt: skip


def qwen3(random: Random) -> dict[str, Any]:
    return {
        "model_type": "qwen3", **base(random), **head_sizes(random), **rope_fields(random), "num_hidden_layers": 3,
        "intermediate_size": random.randint(3, 20), "attention_bias": random.random() < 0.5,
        "use_sliding_window": random.random() < 0.5, "sliding_window": 5, "max_window_layers": random.randint(0, 3),
    }  # fmt: skip


def mistral(random: Random) -> dict[str, Any]:
    return {
        "model_type": "mistral", **base(random), **head_sizes(random), **rope_fields(random),
        "intermediate_size": random.randint(3, 20), "sliding_window": random.choice([None, 3, 7]),
    }  # fmt: skip


def qwen2(random: Random) -> dict[str, Any]:
    return {
        "model_type": "qwen2", **base(random), **head_sizes(random, head_dim=False), **rope_fields(random),
        "num_hidden_layers": 3, "intermediate_size": random.randint(3, 20),
        "use_sliding_window": random.random() < 0.5, "sliding_window": 5, "max_window_layers": random.randint(0, 3),
    }  # fmt: skip


def gemma3_text(random: Random) -> dict[str, Any]:
    heads = head_sizes(random)
    return {
        "model_type": "gemma3_text", **base(random), **heads, **local_rope_fields(random), "num_hidden_layers": 3,
        "intermediate_size": random.randint(3, 20), "attention_bias": random.random() < 0.5,
        "query_pre_attn_scalar": random.randint(2, 30), "sliding_window": random.choice([2, 5]),
        "layer_types": [random.choice(["full_attention", "sliding_attention"]) for _ in range(3)], "pad_token_id": 0,
    }  # fmt: skip


def gemma4_text(random: Random) -> dict[str, Any]:
    local_heads, groups, layers = random.choice([1, 2, 4]), random.randint(1, 3), random.randint(1, 3)
    shares, experts = random.random() < 0.6, expert_counts(random)
    parts = {"enable_moe_block": True, "num_experts": experts[0], "top_k_experts": experts[1],
             "moe_intermediate_size": random.randint(3, 20)}  # fmt: skip
    rope = local_rope_fields(random)["rope_parameters"]
    if random.random() < 0.8:
        proportional = {"rope_type": "proportional", "partial_rotary_factor": random.choice([0.25, 0.5, 1.0])}
        rope["full_attention"] = {**proportional, "rope_theta": 100.0, "factor": random.choice([1.0, 2.5])}
    return {
        "model_type": "gemma4_text", **base(random), "rope_parameters": rope, "num_hidden_layers": layers,
        "num_attention_heads": 4 * groups, "num_key_value_heads": local_heads, "head_dim": 2 * random.randint(2, 6),
        "global_head_dim": 2 * random.randint(2, 10), "attention_k_eq_v": shares,
        "num_global_key_value_heads": random.choice([None, 1, 2]) if shares else None,
        "intermediate_size": random.randint(3, 20), **(parts if random.random() < 0.8 else {}),
        "attention_bias": random.random() < 0.5, "sliding_window": random.choice([2, 5]),
        "final_logit_softcapping": random.choice([None, 2.0]), "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": random.choice([None, "vision"]),
        "layer_types": [*random.choices(["full_attention", "sliding_attention"], k=layers - 1), "full_attention"],
        "pad_token_id": 0,
    }  # fmt: skip
