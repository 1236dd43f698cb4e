"""Families whose routers choose by sigmoid."""

from random import Random
from typing import Any

from tests.language.families.sizes import (
    base,
    expert_counts,
    head_sizes,
    local_rope_fields,
    random_layer_types,
    rope_fields,
)


def glm4_moe(random: Random) -> dict[str, Any]:
    groups, group_size = random.randint(1, 3), random.randint(2, 3)
    top_groups = random.randint(1, groups)
    heads = {**head_sizes(random), "head_dim": 8 * random.randint(1, 3)}
    return {
        "model_type": "glm4_moe", **base(random), **heads, **rope_fields(random, 0.5), "num_hidden_layers": 3,
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "n_routed_experts": groups * group_size, "n_shared_experts": random.randint(1, 2), "n_group": groups,
        "topk_group": top_groups, "num_experts_per_tok": random.randint(1, top_groups * group_size),
        "routed_scaling_factor": random.choice([1.0, 2.5]), "norm_topk_prob": random.random() < 0.5,
        "first_k_dense_replace": random.randint(0, 2), "attention_bias": random.random() < 0.5,
        "use_qk_norm": random.random() < 0.5, "pad_token_id": 17,
    }  # fmt: skip


def dots1(random: Random) -> dict[str, Any]:
    fields = {key: value for key, value in glm4_moe(random).items() if key not in ("use_qk_norm", "head_dim")}
    return {
        **fields, **head_sizes(random, head_dim=False), **rope_fields(random), "model_type": "dots1",
        "sliding_window": random.choice([None, 3]), "max_window_layers": random.randint(0, 3), "pad_token_id": None,
    }  # fmt: skip


def solar_open(random: Random) -> dict[str, Any]:
    fields = {key: value for key, value in glm4_moe(random).items()
              if key not in ("use_qk_norm", "first_k_dense_replace", "intermediate_size")}  # fmt: skip
    return {**fields, **rope_fields(random), "model_type": "solar_open"}


def sarvam_moe(random: Random) -> dict[str, Any]:
    return {**glm4_moe(random), **rope_fields(random, random.choice([0.5, 1.0])), "model_type": "sarvam_moe"}


def hy_v3(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    return {
        "model_type": "hy_v3", **base(random), **head_sizes(random), **rope_fields(random), "num_hidden_layers": 3,
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "num_experts": experts, "num_experts_per_tok": top_k, "num_shared_experts": random.randint(1, 2),
        "router_scaling_factor": random.choice([1.0, 2.5]), "attention_bias": random.random() < 0.5,
        "mlp_layer_types": random_layer_types(random),
    }  # fmt: skip


def exaone_moe(random: Random) -> dict[str, Any]:
    groups, group_size = random.randint(1, 3), random.randint(2, 3)
    return {
        "model_type": "exaone_moe", **base(random), **head_sizes(random), **rope_fields(random), "num_hidden_layers": 3,
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "num_experts": groups * group_size, "num_shared_experts": random.randint(1, 2), "n_group": groups,
        "topk_group": groups, "num_experts_per_tok": random.randint(1, groups * group_size),
        "routed_scaling_factor": random.choice([1.0, 2.5]), "norm_topk_prob": random.random() < 0.5,
        "mlp_layer_types": random_layer_types(random), "sliding_window": random.choice([3, 7]),
        "layer_types": random.choices(["full_attention", "sliding_attention"], k=3),
    }  # fmt: skip


def bailing_moe_v2(random: Random) -> dict[str, Any]:
    fields = sarvam_moe(random)
    top_k = max(2, fields["num_experts_per_tok"])  # a single expert's weight is not normalized, unlike GLM's
    return {**fields, "model_type": "bailing_moe_v2", "norm_topk_prob": True, "num_experts_per_tok": top_k}


def minimax_m2(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    heads = {**head_sizes(random), "head_dim": 8 * random.randint(1, 3)}
    return {
        "model_type": "minimax_m2", **base(random), **heads, **rope_fields(random, random.choice([0.5, 1.0])),
        "intermediate_size": random.randint(3, 20), "num_local_experts": experts, "num_experts_per_tok": top_k,
    }  # fmt: skip


def mimo_v2_flash(random: Random) -> dict[str, Any]:
    groups, group_size = random.randint(1, 3), random.randint(2, 3)
    top_groups = random.randint(1, groups)
    kv_heads = random.randint(1, 2)
    heads = 2 * kv_heads * random.randint(1, 2)
    layer_types = ["full_attention", *(random.choice(["full_attention", "sliding_attention"]) for _ in range(2))]
    return {
        "model_type": "mimo_v2_flash", **base(random), **local_rope_fields(random, 0.5), "num_hidden_layers": 3,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8 * random.randint(1, 2),
        "v_head_dim": random.randint(3, 9), "attention_bias": random.random() < 0.5,
        "attention_value_scale": random.choice([0.707, None]), "sliding_window": random.choice([2, 5]),
        "layer_types": layer_types, "mlp_layer_types": random.choice([None, ["sparse", "dense", "sparse"]]),
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "n_routed_experts": groups * group_size, "num_experts_per_tok": random.randint(1, top_groups * group_size),
        "n_group": groups, "topk_group": top_groups, "norm_topk_prob": random.random() < 0.5,
        "routed_scaling_factor": random.choice([1.0, 2.5]),
    }  # fmt: skip


def llama4_text(random: Random) -> dict[str, Any]:
    """Chunks that end within short documents. Scaling of queries begins after the padding of these tests, which
    transformers counts."""
    experts, top_k = expert_counts(random)
    layers = random.randint(2, 4)
    rotary = [*random.choices([0, 1], k=layers - 1), random.choice([0, 1, 1])]
    rope = rope_fields(random)["rope_parameters"]
    if rope["rope_type"] == "llama3":  # as published with Scout, or without frequencies between low and high ones
        rope["high_freq_factor"] = random.choice([1.0, 4.0])
    placement: dict[str, Any] = random.choice([
        {"no_rope_layers": rotary}, {"no_rope_layers": None, "no_rope_layer_interval": random.choice([2, 4])},
        {"no_rope_layers": rotary,
         "layer_types": random.choices(["chunked_attention", "chunked_attention", "full_attention"], k=layers)},
    ])  # fmt: skip
    chunk = random.choice([1, 3, 7, 7]) if "layer_types" in placement else random.choice([None, 3, 7, 7])
    sparse: dict[str, Any] = random.choice([
        {"interleave_moe_layer_step": random.randint(1, 2)}, {"moe_layers": sorted(random.sample(range(layers), 2))},
    ])  # fmt: skip
    return {
        "model_type": "llama4_text", **base(random), **head_sizes(random), "rope_parameters": rope,
        "num_hidden_layers": layers, **placement, **sparse, "attention_chunk_size": chunk,
        "intermediate_size": random.randint(3, 20), "intermediate_size_mlp": random.randint(3, 20),
        "num_local_experts": experts, "num_experts_per_tok": top_k, "attention_bias": random.random() < 0.5,
        "use_qk_norm": random.random() < 0.7, "attn_temperature_tuning": random.random() < 0.7,
        "floor_scale": random.choice([13, 20]), "attn_scale": random.choice([0.1, 2.0]),
        "pad_token_id": random.choice([None, 18]),
    }  # fmt: skip
