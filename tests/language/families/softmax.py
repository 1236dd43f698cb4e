"""Families whose routers choose by softmax, or by SparseMixer."""

from random import Random
from typing import Any

from tests.language.families.sizes import (
    SPARSE,
    base,
    expert_counts,
    head_sizes,
    local_rope_fields,
    random_layer_types,
    rope_fields,
)


def mixtral(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    return {
        "model_type": "mixtral", **base(random), **head_sizes(random), **rope_fields(random),
        "intermediate_size": random.randint(3, 20), "num_local_experts": experts, "num_experts_per_tok": top_k,
        "sliding_window": random.choice([None, 3, 7]),
    }  # fmt: skip


def qwen2_moe(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    heads = head_sizes(random, head_dim=False)
    return {
        "model_type": "qwen2_moe", **base(random), **heads, **rope_fields(random), "num_hidden_layers": 3,
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "shared_expert_intermediate_size": random.randint(3, 20), "num_experts": experts,
        "num_experts_per_tok": top_k, "norm_topk_prob": random.random() < 0.5, "qkv_bias": random.random() < 0.7,
        "use_sliding_window": random.random() < 0.5, "sliding_window": 5, "max_window_layers": random.randint(0, 3),
        **random.choice(SPARSE),
    }  # fmt: skip


def qwen3_moe(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    return {
        "model_type": "qwen3_moe", **base(random), **head_sizes(random), **rope_fields(random), "num_hidden_layers": 2,
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "num_experts": experts, "num_experts_per_tok": top_k, "norm_topk_prob": random.random() < 0.5,
        "attention_bias": random.random() < 0.5, "use_sliding_window": random.random() < 0.5, "sliding_window": 5,
        **random.choice(SPARSE),
    }  # fmt: skip


def olmoe(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    heads = head_sizes(random, head_dim=False)
    return {
        "model_type": "olmoe", **base(random), **heads, **rope_fields(random),
        "intermediate_size": random.randint(3, 20),
        "num_experts": experts, "num_experts_per_tok": top_k, "norm_topk_prob": random.random() < 0.5,
        "attention_bias": random.random() < 0.5, "clip_qkv": random.choice([None, 0.5]), "pad_token_id": 1,
    }  # fmt: skip


def flex_olmo(random: Random) -> dict[str, Any]:
    fields = {key: value for key, value in olmoe(random).items() if key != "clip_qkv"}
    return {**fields, "model_type": "flex_olmo"}


def gpt_oss(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    return {
        "model_type": "gpt_oss", **base(random), **head_sizes(random), **rope_fields(random), "num_hidden_layers": 3,
        "intermediate_size": random.randint(3, 20), "num_local_experts": experts, "num_experts_per_tok": top_k,
        "sliding_window": random.choice([2, 5]), "attention_bias": random.random() < 0.7,
        "swiglu_limit": random.choice([0.5, 7.0]), "pad_token_id": 19,
    }  # fmt: skip


def ernie4_5_moe(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    heads = head_sizes(random, head_dim=False)
    return {
        "model_type": "ernie4_5_moe", **base(random), **heads, **rope_fields(random), "num_hidden_layers": 4,
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "moe_num_experts": experts, "moe_k": top_k, "moe_num_shared_experts": random.randint(0, 2),
        "moe_layer_start_index": random.randint(0, 2), "moe_layer_end_index": random.choice([-1, 2, 3]),
        "moe_layer_interval": 1,
    }  # fmt: skip


def hunyuan_v1_moe(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    rope = random.choice(
        [
            rope_fields(random),
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "alpha": 50.0,
                    "rope_theta": 1e4,
                    "factor": 1.0,
                    "beta_fast": 32,
                    "mscale": 1.0,
                }
            },
        ]
    )
    return {
        "model_type": "hunyuan_v1_moe", **base(random), **head_sizes(random), **rope,
        "intermediate_size": random.randint(3, 20), "num_experts": experts, "moe_topk": top_k,
        "attention_bias": random.random() < 0.5,
    }  # fmt: skip


def granitemoe(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    heads = head_sizes(random, head_dim=False)
    return {
        "model_type": "granitemoe", **base(random), **heads, **rope_fields(random),
        "intermediate_size": random.randint(3, 20),
        "num_local_experts": experts, "num_experts_per_tok": top_k, "attention_bias": random.random() < 0.5,
        "attention_multiplier": random.choice([1.0, 0.3]), "embedding_multiplier": random.choice([1.0, 3.0]),
        "residual_multiplier": random.choice([1.0, 0.22]), "logits_scaling": random.choice([1.0, 6.0]),
        "pad_token_id": 0,
    }  # fmt: skip


def granitemoeshared(random: Random) -> dict[str, Any]:
    return {**granitemoe(random), "model_type": "granitemoeshared",
            "shared_intermediate_size": random.choice([0, random.randint(3, 20)])}  # fmt: skip


def flint(random: Random) -> dict[str, Any]:
    without = ("use_sliding_window", "sliding_window", "decoder_sparse_step", "mlp_only_layers")
    config = {key: value for key, value in qwen3_moe(random).items() if key not in without}
    layers = random.randint(2, 4)
    return {
        **config, "model_type": "flint", "num_hidden_layers": layers, "sliding_window": random.choice([2, 5]),
        "layer_types": random.choices(["full_attention", "sliding_attention"], k=layers), **random.choice(SPARSE),
        "shared_expert_intermediate_size": random.randint(3, 20),
    }  # fmt: skip


def mellum(random: Random) -> dict[str, Any]:
    without = ("use_sliding_window", "decoder_sparse_step", "mlp_only_layers")
    config = {key: value for key, value in qwen3_moe(random).items() if key not in without}
    return {
        **config, **local_rope_fields(random), "model_type": "mellum", "num_hidden_layers": 3,
        "mlp_layer_types": random_layer_types(random),
        "sliding_window": random.choice([2, 5]),
        "layer_types": random.choices(["full_attention", "sliding_attention"], k=3),
    }  # fmt: skip


def phimoe(random: Random) -> dict[str, Any]:
    """LongRoPE of two lengths beyond all sequences, as transformers 5.24 always applies the short factors; else of
    factors that are the same for both lengths."""
    heads = head_sizes(random, head_dim=random.random() < 0.5)
    head_dim = heads.get("head_dim", heads["hidden_size"] // heads["num_attention_heads"])
    length = random.choice([16, 128])
    short = [random.uniform(1.0, 2.0) for _ in range(head_dim // 2)]
    mscale = random.choice([1.0, 1.243])
    rope = random.choice([
        {"rope_type": "default"},
        {"rope_type": "longrope", "original_max_position_embeddings": length, "short_factor": short,
         "long_factor": short if length == 16 else [4 * factor for factor in short], "short_mscale": mscale,
         "long_mscale": mscale if length == 16 else 1.5},
    ])  # fmt: skip
    return {
        "model_type": "phimoe", **base(random), **heads, "rope_parameters": {**rope, "rope_theta": 1e4},
        "intermediate_size": random.randint(3, 20), "num_local_experts": random.randint(2, 9),
        "num_experts_per_tok": 2, "sliding_window": random.choice([None, 7]),
        "router_jitter_noise": random.choice([0.01, 0.3, 2.0]), "attention_bias": random.random() < 0.7,
        "lm_head_bias": random.random() < 0.7,
        "max_position_embeddings": 256,
    }  # fmt: skip


def bailing_moe(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    layers = random.randint(1, 3)
    return {
        "model_type": "bailing_moe", "architectures": ["BailingMoeForCausalLM"], **base(random),
        **head_sizes(random, head_dim=random.random() < 0.5), **rope_fields(random), "num_hidden_layers": layers,
        "tie_word_embeddings": False, "intermediate_size": random.randint(3, 20),
        "moe_intermediate_size": random.randint(3, 20), "num_experts": experts, "num_experts_per_tok": top_k,
        "num_shared_experts": random.randint(1, 2), "norm_topk_prob": random.random() < 0.7,
        "first_k_dense_replace": random.randint(0, layers - 1), "use_bias": False,
        "use_qkv_bias": random.random() < 0.5, "norm_head": random.random() < 0.7,
        "pad_token_id": random.choice([None, 18]),
    }  # fmt: skip
