"""Families with recurrent layers or convolutions beside attention."""

from random import Random
from typing import Any

from tests.language.families.sizes import SPARSE, base, expert_counts, head_sizes, rope_fields
from tests.language.families.softmax import granitemoe


def qwen3_next(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    key_heads = random.randint(1, 3)
    heads = {**head_sizes(random), "head_dim": 16 * random.randint(1, 2)}
    return {
        "model_type": "qwen3_next", **base(random), **heads, **rope_fields(random, 0.25), "num_hidden_layers": 4,
        "full_attention_interval": random.choice([2, 4]), "intermediate_size": random.randint(3, 20),
        "moe_intermediate_size": random.randint(3, 20), "shared_expert_intermediate_size": random.randint(3, 20),
        "num_experts": experts, "num_experts_per_tok": top_k, "norm_topk_prob": random.random() < 0.5,
        **random.choice(SPARSE), "attention_bias": random.random() < 0.5, "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * random.randint(1, 2), "linear_key_head_dim": random.randint(2, 6),
        "linear_value_head_dim": random.randint(2, 6), "linear_conv_kernel_dim": random.choice([2, 4]),
    }  # fmt: skip


def qwen3_5_moe_text(random: Random) -> dict[str, Any]:
    without = ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "intermediate_size")
    config = {key: value for key, value in qwen3_next(random).items() if key not in without}
    return {**config, "model_type": "qwen3_5_moe_text"}


def lfm2_moe(random: Random) -> dict[str, Any]:
    experts, top_k = expert_counts(random)
    heads = head_sizes(random, head_dim=False)
    common = {key: value for key, value in base(random).items() if key != "rms_norm_eps"}
    return {
        "model_type": "lfm2_moe", **common, **heads, **rope_fields(random), "num_hidden_layers": 4,
        "layer_types": random.sample(["conv", "conv", "full_attention", random.choice(["conv", "full_attention"])], 4),
        "norm_eps": random.choice([1e-5, 1e-3]), "intermediate_size": random.randint(3, 20),
        "moe_intermediate_size": random.randint(3, 20), "num_dense_layers": random.randint(0, 3),
        "num_experts": experts, "num_experts_per_tok": top_k, "norm_topk_prob": random.random() < 0.7,
        "routed_scaling_factor": random.choice([1.0, 2.5]), "use_expert_bias": random.random() < 0.7,
        "conv_bias": False, "conv_L_cache": random.randint(1, 4),
    }  # fmt: skip


def granitemoehybrid(random: Random) -> dict[str, Any]:
    groups, head_dim = random.randint(1, 3), 2 * random.randint(1, 4)
    heads = groups * random.randint(1, 3)
    # The width of all heads is a multiple of the model's.
    width, expand = heads * head_dim, random.choice([1, 2])
    moe = granitemoe(random)
    dense = {key: value for key, value in moe.items() if key != "num_experts_per_tok"} | {"num_local_experts": 0}
    return {
        **random.choice([moe, moe, dense]), "model_type": "granitemoehybrid", "num_hidden_layers": 4,
        "hidden_size": 4 * width, "num_attention_heads": 2, "num_key_value_heads": random.choice([1, 2]),
        "layer_types": random.sample(["linear_attention", "linear_attention", "full_attention",
                                      random.choice(["linear_attention", "full_attention"])], 4),
        "position_embedding_type": random.choice(["rope", None]),
        "shared_intermediate_size": random.randint(3, 20), "mamba_n_heads": 4 * heads * expand,
        "mamba_n_groups": groups,
        "mamba_d_head": head_dim, "mamba_d_state": random.randint(2, 6), "mamba_d_conv": random.choice([2, 4]),
        "mamba_expand": expand, "mamba_chunk_size": random.choice([8, 64]), "mamba_conv_bias": random.random() < 0.7,
        "mamba_proj_bias": False,
    }  # fmt: skip


def nemotron_h(random: Random) -> dict[str, Any]:
    kinds = ["linear_attention", "full_attention", "mlp", "moe"]
    without = ("num_hidden_layers", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")
    common = {key: value for key, value in base(random).items() if key not in without}
    groups, num_expert_groups = random.randint(1, 3), random.randint(1, 3)
    moe: dict[str, Any] = {
        "n_routed_experts": 2 * num_expert_groups, "n_group": num_expert_groups, "topk_group": 1,
        "num_experts_per_tok": random.randint(1, 2), "moe_latent_size": random.choice([None, random.randint(3, 9)]),
        "moe_intermediate_size": random.randint(3, 20), "moe_shared_expert_intermediate_size": random.randint(3, 20),
        "routed_scaling_factor": random.choice([1.0, 2.5]), "norm_topk_prob": random.random() < 0.7,
    }  # fmt: skip
    return {
        "model_type": "nemotron_h", **common, **head_sizes(random), **moe,
        "layers_block_type": random.sample([*kinds, *random.choices(kinds, k=2)], 6),
        "layer_norm_epsilon": random.choice([1e-5, 1e-3]), "intermediate_size": random.randint(3, 20),
        "mamba_num_heads": groups * random.randint(1, 3), "mamba_head_dim": random.randint(2, 6),
        "n_groups": groups, "ssm_state_size": random.randint(2, 6), "conv_kernel": random.choice([2, 4]),
        "use_conv_bias": random.random() < 0.7, "time_step_min": 0.001,
        "chunk_size": random.choice([8, 64]), "tie_word_embeddings": False,
    }  # fmt: skip
