"""Families with latent attention."""

from random import Random
from typing import Any

from tests.language.families.sizes import base, expert_counts, random_layer_types

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}


def _latent(random: Random) -> dict[str, Any]:
    heads, width = random.randint(1, 5), 4 * random.randint(2, 6)
    yarn = {**YARN, "mscale": random.choice([0.7, 1.0]), "mscale_all_dim": random.choice([0.5, 1.0])}
    rope = random.choice([yarn, {"rope_type": "default"}])
    return {
        "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * width,
        "q_lora_rank": random.choice([None, 7]),
        "kv_lora_rank": 2 * random.randint(2, 5), "qk_nope_head_dim": 2 * random.randint(2, 5),
        "qk_rope_head_dim": 2 * random.randint(1, 4), "v_head_dim": random.randint(3, 9),
        "attention_bias": random.random() < 0.5, "rope_parameters": {**rope, "rope_theta": 100.0},
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "num_hidden_layers": 3, "first_k_dense_replace": random.randint(0, 2),
    }  # fmt: skip


def deepseek_v2(random: Random) -> dict[str, Any]:
    groups, group_size = random.randint(1, 4), random.randint(1, 3)
    top_groups = random.randint(1, groups)
    method = random.choice(["greedy", "group_limited_greedy"])
    return {
        "model_type": "deepseek_v2", **base(random), **_latent(random), "n_routed_experts": groups * group_size,
        "n_shared_experts": random.randint(1, 2), "num_experts_per_tok": random.randint(1, top_groups * group_size),
        "topk_method": method, "n_group": groups, "topk_group": top_groups,
        "routed_scaling_factor": random.choice([1.0, 2.5]), "norm_topk_prob": False,
    }  # fmt: skip


def deepseek_v3(random: Random) -> dict[str, Any]:
    groups, group_size = random.randint(1, 4), random.randint(2, 3)
    top_groups = random.randint(1, groups)
    return {
        "model_type": "deepseek_v3", **base(random), **_latent(random), "n_routed_experts": groups * group_size,
        "n_shared_experts": random.randint(1, 2), "num_experts_per_tok": random.randint(1, top_groups * group_size),
        "n_group": groups, "topk_group": top_groups, "routed_scaling_factor": random.choice([1.0, 2.5]),
        "norm_topk_prob": random.random() < 0.5, "rope_interleave": random.random() < 0.7,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip


def glm4_moe_lite(random: Random) -> dict[str, Any]:
    fields = {key: value for key, value in deepseek_v3(random).items() if key != "first_k_dense_replace"}
    return {**fields, "model_type": "glm4_moe_lite", "mlp_layer_types": random_layer_types(random)}


def sarvam_mla(random: Random) -> dict[str, Any]:
    return {**deepseek_v3(random), "model_type": "sarvam_mla"}


def mistral4(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    fields = _latent(random)
    yarn, unscaled = {**YARN, "mscale_all_dim": random.choice([0.5, 1.0])}, {"rope_type": "linear", "factor": 1.0}
    fields["rope_parameters"] = {
        **random.choice([yarn, yarn, unscaled]), "rope_theta": 100.0,
        "original_max_position_embeddings": random.choice([3, 8]), "llama_4_scaling_beta": random.choice([0.1, 2.0]),
    }  # fmt: skip
    return {
        "model_type": "mistral4", **base(random), **fields, "n_routed_experts": experts,
        "n_shared_experts": random.randint(1, 2), "num_experts_per_tok": top_k,
        "routed_scaling_factor": random.choice([1.0, 2.5]), "norm_topk_prob": random.random() < 0.5,
        "rope_interleave": random.random() < 0.7,
    }  # fmt: skip


def deepseek_v32(random: Random) -> dict[str, Any]:
    """As many index heads as make equal scores, of pairs without a positive product, unlikely: of these, transformers
    selects any."""
    latent = _latent(random)
    latent["q_lora_rank"] = 7
    return {
        **deepseek_v3(random), **latent, "model_type": "deepseek_v32", "index_topk": random.choice([2, 5, 11, 64]),
        "index_n_heads": random.randint(24, 32), "rope_interleave": True,
        "index_head_dim": latent["qk_rope_head_dim"] + random.randint(0, 5),
        **random.choice([{}, {"mlp_layer_types": ["sparse", "dense", "sparse"]}]),
    }  # fmt: skip


def glm_moe_dsa(random: Random) -> dict[str, Any]:
    shared: list[dict[str, Any]] = [
        {}, {"indexer_types": ["full", "shared", "full"]}, {"index_topk_pattern": "FSS"},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    ]  # fmt: skip
    return {**deepseek_v32(random), "model_type": "glm_moe_dsa", **random.choice(shared)}
