"""Random configs of small models of each family, as transformers has them."""

from collections.abc import Callable
from random import Random
from typing import Any

Make = Callable[[Random], dict[str, Any]]


def _common(random: Random, **overrides: Any) -> dict[str, Any]:
    """Sizes that nothing divides evenly. Families that are published with a padding token have one."""
    return {
        "vocab_size": random.randint(20, 60), "hidden_size": 4 * random.randint(3, 10),
        "num_hidden_layers": random.randint(1, 3), "max_position_embeddings": 64,
        "tie_word_embeddings": random.random() < 0.3, "rms_norm_eps": random.choice([1e-6, 1e-5, 1e-3]),
        "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **overrides,
    }  # fmt: skip


def _heads(random: Random, *, head_dim: bool = True) -> dict[str, Any]:
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


def _experts(random: Random) -> tuple[int, int]:
    """(E, K)"""
    number = random.randint(3, 9)
    return number, random.randint(1, min(4, number))


def _rope(random: Random, partial: float | None = None) -> dict[str, Any]:
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


def mixtral(random: Random) -> dict[str, Any]:
    experts, top_k = _experts(random)
    return {
        "model_type": "mixtral", **_common(random), **_heads(random), **_rope(random),
        "intermediate_size": random.randint(3, 20), "num_local_experts": experts, "num_experts_per_tok": top_k,
        "sliding_window": random.choice([None, 3, 7]),
    }  # fmt: skip


def qwen2_moe(random: Random) -> dict[str, Any]:
    experts, top_k = _experts(random)
    heads = _heads(random, head_dim=False)
    return {
        "model_type": "qwen2_moe", **_common(random), **heads, **_rope(random), "num_hidden_layers": 3,
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "shared_expert_intermediate_size": random.randint(3, 20), "num_experts": experts,
        "num_experts_per_tok": top_k, "norm_topk_prob": random.random() < 0.5, "qkv_bias": random.random() < 0.7,
        "use_sliding_window": random.random() < 0.5, "sliding_window": 5, "max_window_layers": random.randint(0, 3),
        **random.choice(SPARSE),
    }  # fmt: skip


def qwen3_moe(random: Random) -> dict[str, Any]:
    experts, top_k = _experts(random)
    return {
        "model_type": "qwen3_moe", **_common(random), **_heads(random), **_rope(random), "num_hidden_layers": 2,
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "num_experts": experts, "num_experts_per_tok": top_k, "norm_topk_prob": random.random() < 0.5,
        "attention_bias": random.random() < 0.5, "use_sliding_window": random.random() < 0.5, "sliding_window": 5,
        **random.choice(SPARSE),
    }  # fmt: skip


def olmoe(random: Random) -> dict[str, Any]:
    experts, top_k = _experts(random)
    heads = _heads(random, head_dim=False)
    return {
        "model_type": "olmoe", **_common(random), **heads, **_rope(random), "intermediate_size": random.randint(3, 20),
        "num_experts": experts, "num_experts_per_tok": top_k, "norm_topk_prob": random.random() < 0.5,
        "attention_bias": random.random() < 0.5, "clip_qkv": random.choice([None, 0.5]), "pad_token_id": 1,
    }  # fmt: skip


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
        "model_type": "deepseek_v2", **_common(random), **_latent(random), "n_routed_experts": groups * group_size,
        "n_shared_experts": random.randint(1, 2), "num_experts_per_tok": random.randint(1, top_groups * group_size),
        "topk_method": method, "n_group": groups, "topk_group": top_groups,
        "routed_scaling_factor": random.choice([1.0, 2.5]), "norm_topk_prob": False,
    }  # fmt: skip


def deepseek_v3(random: Random) -> dict[str, Any]:
    groups, group_size = random.randint(1, 4), random.randint(2, 3)
    top_groups = random.randint(1, groups)
    return {
        "model_type": "deepseek_v3", **_common(random), **_latent(random), "n_routed_experts": groups * group_size,
        "n_shared_experts": random.randint(1, 2), "num_experts_per_tok": random.randint(1, top_groups * group_size),
        "n_group": groups, "topk_group": top_groups, "routed_scaling_factor": random.choice([1.0, 2.5]),
        "norm_topk_prob": random.random() < 0.5, "rope_interleave": random.random() < 0.7,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip


def glm4_moe_lite(random: Random) -> dict[str, Any]:
    fields = {key: value for key, value in deepseek_v3(random).items() if key != "first_k_dense_replace"}
    return {**fields, "model_type": "glm4_moe_lite", "mlp_layer_types": _layer_types(random)}


def _layer_types(random: Random) -> list[str]:
    """Of three layers, at least one with experts."""
    types = ["sparse", *random.choices(["sparse", "dense"], k=2)]
    random.shuffle(types)
    return types


def sarvam_mla(random: Random) -> dict[str, Any]:
    return {**deepseek_v3(random), "model_type": "sarvam_mla"}


def gpt_oss(random: Random) -> dict[str, Any]:
    experts, top_k = _experts(random)
    return {
        "model_type": "gpt_oss", **_common(random), **_heads(random), **_rope(random), "num_hidden_layers": 3,
        "intermediate_size": random.randint(3, 20), "num_local_experts": experts, "num_experts_per_tok": top_k,
        "sliding_window": random.choice([2, 5]), "attention_bias": random.random() < 0.7,
        "swiglu_limit": random.choice([0.5, 7.0]), "pad_token_id": 19,
    }  # fmt: skip


def glm4_moe(random: Random) -> dict[str, Any]:
    groups, group_size = random.randint(1, 3), random.randint(2, 3)
    top_groups = random.randint(1, groups)
    heads = {**_heads(random), "head_dim": 8 * random.randint(1, 3)}
    return {
        "model_type": "glm4_moe", **_common(random), **heads, **_rope(random, 0.5), "num_hidden_layers": 3,
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
        **fields, **_heads(random, head_dim=False), **_rope(random), "model_type": "dots1",
        "sliding_window": random.choice([None, 3]), "max_window_layers": random.randint(0, 3), "pad_token_id": None,
    }  # fmt: skip


def solar_open(random: Random) -> dict[str, Any]:
    fields = {key: value for key, value in glm4_moe(random).items()
              if key not in ("use_qk_norm", "first_k_dense_replace", "intermediate_size")}  # fmt: skip
    return {**fields, **_rope(random), "model_type": "solar_open"}


def sarvam_moe(random: Random) -> dict[str, Any]:
    return {**glm4_moe(random), **_rope(random, random.choice([0.5, 1.0])), "model_type": "sarvam_moe"}


def hy_v3(random: Random) -> dict[str, Any]:
    experts, top_k = _experts(random)
    return {
        "model_type": "hy_v3", **_common(random), **_heads(random), **_rope(random), "num_hidden_layers": 3,
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "num_experts": experts, "num_experts_per_tok": top_k, "num_shared_experts": random.randint(1, 2),
        "router_scaling_factor": random.choice([1.0, 2.5]), "attention_bias": random.random() < 0.5,
        "mlp_layer_types": _layer_types(random),
    }  # fmt: skip


def mistral4(random: Random) -> dict[str, Any]:
    experts, top_k = _experts(random)
    fields = _latent(random)
    yarn, unscaled = {**YARN, "mscale_all_dim": random.choice([0.5, 1.0])}, {"rope_type": "linear", "factor": 1.0}
    fields["rope_parameters"] = {
        **random.choice([yarn, yarn, unscaled]), "rope_theta": 100.0,
        "original_max_position_embeddings": random.choice([3, 8]), "llama_4_scaling_beta": random.choice([0.1, 2.0]),
    }  # fmt: skip
    return {
        "model_type": "mistral4", **_common(random), **fields, "n_routed_experts": experts,
        "n_shared_experts": random.randint(1, 2), "num_experts_per_tok": top_k,
        "routed_scaling_factor": random.choice([1.0, 2.5]), "norm_topk_prob": random.random() < 0.5,
        "rope_interleave": random.random() < 0.7,
    }  # fmt: skip


def ernie4_5_moe(random: Random) -> dict[str, Any]:
    experts, top_k = _experts(random)
    heads = _heads(random, head_dim=False)
    return {
        "model_type": "ernie4_5_moe", **_common(random), **heads, **_rope(random), "num_hidden_layers": 4,
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "moe_num_experts": experts, "moe_k": top_k, "moe_num_shared_experts": random.randint(0, 2),
        "moe_layer_start_index": random.randint(0, 2), "moe_layer_end_index": random.choice([-1, 2, 3]),
        "moe_layer_interval": 1,
    }  # fmt: skip


def hunyuan_v1_moe(random: Random) -> dict[str, Any]:
    experts, top_k = _experts(random)
    rope = random.choice(
        [
            _rope(random),
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
        "model_type": "hunyuan_v1_moe", **_common(random), **_heads(random), **rope,
        "intermediate_size": random.randint(3, 20), "num_experts": experts, "moe_topk": top_k,
        "attention_bias": random.random() < 0.5,
    }  # fmt: skip


def flex_olmo(random: Random) -> dict[str, Any]:
    fields = {key: value for key, value in olmoe(random).items() if key != "clip_qkv"}
    return {**fields, "model_type": "flex_olmo"}


def exaone_moe(random: Random) -> dict[str, Any]:
    groups, group_size = random.randint(1, 3), random.randint(2, 3)
    return {
        "model_type": "exaone_moe", **_common(random), **_heads(random), **_rope(random), "num_hidden_layers": 3,
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "num_experts": groups * group_size, "num_shared_experts": random.randint(1, 2), "n_group": groups,
        "topk_group": groups, "num_experts_per_tok": random.randint(1, groups * group_size),
        "routed_scaling_factor": random.choice([1.0, 2.5]), "norm_topk_prob": random.random() < 0.5,
        "mlp_layer_types": _layer_types(random), "sliding_window": random.choice([3, 7]),
        "layer_types": random.choices(["full_attention", "sliding_attention"], k=3),
    }  # fmt: skip


def bailing_moe_v2(random: Random) -> dict[str, Any]:
    fields = sarvam_moe(random)
    top_k = max(2, fields["num_experts_per_tok"])  # a single expert's weight is not normalized, unlike GLM's
    return {**fields, "model_type": "bailing_moe_v2", "norm_topk_prob": True, "num_experts_per_tok": top_k}


def minimax_m2(random: Random) -> dict[str, Any]:
    experts, top_k = _experts(random)
    heads = {**_heads(random), "head_dim": 8 * random.randint(1, 3)}
    return {
        "model_type": "minimax_m2", **_common(random), **heads, **_rope(random, random.choice([0.5, 1.0])),
        "intermediate_size": random.randint(3, 20), "num_local_experts": experts, "num_experts_per_tok": top_k,
    }  # fmt: skip


def granitemoe(random: Random) -> dict[str, Any]:
    experts, top_k = _experts(random)
    heads = _heads(random, head_dim=False)
    return {
        "model_type": "granitemoe", **_common(random), **heads, **_rope(random),
        "intermediate_size": random.randint(3, 20),
        "num_local_experts": experts, "num_experts_per_tok": top_k, "attention_bias": random.random() < 0.5,
        "attention_multiplier": random.choice([1.0, 0.3]), "embedding_multiplier": random.choice([1.0, 3.0]),
        "residual_multiplier": random.choice([1.0, 0.22]), "logits_scaling": random.choice([1.0, 6.0]),
        "pad_token_id": 0,
    }  # fmt: skip


def granitemoeshared(random: Random) -> dict[str, Any]:
    return {**granitemoe(random), "model_type": "granitemoeshared",
            "shared_intermediate_size": random.choice([0, random.randint(3, 20)])}  # fmt: skip


def qwen3_next(random: Random) -> dict[str, Any]:
    experts, top_k = _experts(random)
    key_heads = random.randint(1, 3)
    heads = {**_heads(random), "head_dim": 16 * random.randint(1, 2)}
    return {
        "model_type": "qwen3_next", **_common(random), **heads, **_rope(random, 0.25), "num_hidden_layers": 4,
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


def qwen3_5_moe(random: Random) -> dict[str, Any]:
    text = qwen3_5_moe_text(random)
    text["rope_parameters"] |= _PICTURE_POSITIONS
    return {**_beside_vision(text, **_qwen_vision(text)), "model_type": "qwen3_5_moe"}


def qwen3_vl_moe(random: Random) -> dict[str, Any]:
    text = qwen3_moe(random) | {"norm_topk_prob": True, "use_sliding_window": False}
    while text["hidden_size"] == 2 * text["moe_intermediate_size"]:  # stored either way
        text["moe_intermediate_size"] += 1
    text["rope_parameters"] |= _PICTURE_POSITIONS
    text = {**text, "model_type": "qwen3_vl_moe_text", "sliding_window": None}
    vision = {**_qwen_vision(text), "deepstack_visual_indexes": [0]}
    return {**_beside_vision(text, **vision), "model_type": "qwen3_vl_moe"}


_PICTURE_POSITIONS = {"mrope_section": [1, 1, 1], "mrope_interleaved": True}


def _qwen_vision(text: dict[str, Any]) -> dict[str, Any]:
    return {"depth": 1, "num_heads": 2, "num_position_embeddings": 4, "out_hidden_size": text["hidden_size"]}


def glm4v_moe(random: Random) -> dict[str, Any]:
    text = {key: value for key, value in glm4_moe(random).items() if key != "use_qk_norm"}
    pairs = text["head_dim"] // 4
    text["rope_parameters"] |= {"mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
    vision = {"depth": 1, "num_heads": 2, "out_hidden_size": text["hidden_size"], "image_size": 8}
    return {**_beside_vision({**text, "model_type": "glm4v_moe_text"}, **vision), "model_type": "glm4v_moe"}


def kimi_k25(random: Random) -> dict[str, Any]:
    vision = {"num_hidden_layers": 1, "num_attention_heads": 2}
    return {**_beside_vision(deepseek_v3(random), **vision), "model_type": "kimi_k25"}


def mistral3(random: Random) -> dict[str, Any]:
    """A language model of any family."""
    text = random.choice([mistral4, mistral4, mixtral, qwen3])(random)
    vision = {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4,
              "image_size": 8}  # fmt: skip
    return {**_beside_vision(text, **vision), "model_type": "mistral3"}


def _beside_vision(text: dict[str, Any], **vision: Any) -> dict[str, Any]:
    """A text model in a multimodal one, whose own config says whether embeddings are tied."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "patch_size": 2, **vision}
    return {"text_config": text, "vision_config": sizes, "tie_word_embeddings": text["tie_word_embeddings"]}


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


def lfm2_moe(random: Random) -> dict[str, Any]:
    experts, top_k = _experts(random)
    heads = _heads(random, head_dim=False)
    common = {key: value for key, value in _common(random).items() if key != "rms_norm_eps"}
    return {
        "model_type": "lfm2_moe", **common, **heads, **_rope(random), "num_hidden_layers": 4,
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
    common = {key: value for key, value in _common(random).items() if key not in without}
    groups, num_expert_groups = random.randint(1, 3), random.randint(1, 3)
    moe: dict[str, Any] = {
        "n_routed_experts": 2 * num_expert_groups, "n_group": num_expert_groups, "topk_group": 1,
        "num_experts_per_tok": random.randint(1, 2), "moe_latent_size": random.choice([None, random.randint(3, 9)]),
        "moe_intermediate_size": random.randint(3, 20), "moe_shared_expert_intermediate_size": random.randint(3, 20),
        "routed_scaling_factor": random.choice([1.0, 2.5]), "norm_topk_prob": random.random() < 0.7,
    }  # fmt: skip
    return {
        "model_type": "nemotron_h", **common, **_heads(random), **moe,
        "layers_block_type": random.sample([*kinds, *random.choices(kinds, k=2)], 6),
        "layer_norm_epsilon": random.choice([1e-5, 1e-3]), "intermediate_size": random.randint(3, 20),
        "mamba_num_heads": groups * random.randint(1, 3), "mamba_head_dim": random.randint(2, 6),
        "n_groups": groups, "ssm_state_size": random.randint(2, 6), "conv_kernel": random.choice([2, 4]),
        "use_conv_bias": random.random() < 0.7, "time_step_min": 0.001,
        "chunk_size": random.choice([8, 64]), "tie_word_embeddings": False,
    }  # fmt: skip


def llama(random: Random) -> dict[str, Any]:
    return {
        "model_type": "llama", **_common(random), **_heads(random), **_rope(random),
        "intermediate_size": random.randint(3, 20), "attention_bias": random.random() < 0.5,
    }  # fmt: skip


def qwen3(random: Random) -> dict[str, Any]:
    return {
        "model_type": "qwen3", **_common(random), **_heads(random), **_rope(random), "num_hidden_layers": 3,
        "intermediate_size": random.randint(3, 20), "attention_bias": random.random() < 0.5,
        "use_sliding_window": random.random() < 0.5, "sliding_window": 5, "max_window_layers": random.randint(0, 3),
    }  # fmt: skip


def mistral(random: Random) -> dict[str, Any]:
    return {
        "model_type": "mistral", **_common(random), **_heads(random), **_rope(random),
        "intermediate_size": random.randint(3, 20), "sliding_window": random.choice([None, 3, 7]),
    }  # fmt: skip


def qwen2(random: Random) -> dict[str, Any]:
    return {
        "model_type": "qwen2", **_common(random), **_heads(random, head_dim=False), **_rope(random),
        "num_hidden_layers": 3, "intermediate_size": random.randint(3, 20),
        "use_sliding_window": random.random() < 0.5, "sliding_window": 5, "max_window_layers": random.randint(0, 3),
    }  # fmt: skip


def _local_rope(random: Random, fraction: float | None = None) -> dict[str, Any]:
    """RoPE of each type of layers. transformers scales both dynamically by the longest row, and differently."""
    parameters = {}
    for layer_type in ("full_attention", "sliding_attention"):
        (parameters[layer_type],) = _rope(random, fraction).values()
        if parameters[layer_type]["rope_type"] == "dynamic":
            parameters[layer_type]["rope_type"] = "linear"
        if parameters[layer_type]["rope_type"] == "yarn":
            parameters[layer_type]["truncate"] = True
    return {"rope_parameters": parameters}


def gemma3_text(random: Random) -> dict[str, Any]:
    heads = _heads(random)
    return {
        "model_type": "gemma3_text", **_common(random), **heads, **_local_rope(random), "num_hidden_layers": 3,
        "intermediate_size": random.randint(3, 20), "attention_bias": random.random() < 0.5,
        "query_pre_attn_scalar": random.randint(2, 30), "sliding_window": random.choice([2, 5]),
        "layer_types": [random.choice(["full_attention", "sliding_attention"]) for _ in range(3)], "pad_token_id": 0,
    }  # fmt: skip


def gemma3(random: Random) -> dict[str, Any]:
    vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
    return {**_beside_vision(gemma3_text(random), **vision), "mm_tokens_per_image": 4, "model_type": "gemma3"}


def gemma4_text(random: Random) -> dict[str, Any]:
    local_heads, groups, layers = random.choice([1, 2, 4]), random.randint(1, 3), random.randint(1, 3)
    shares, experts = random.random() < 0.6, _experts(random)
    parts = {"enable_moe_block": True, "num_experts": experts[0], "top_k_experts": experts[1],
             "moe_intermediate_size": random.randint(3, 20)}  # fmt: skip
    rope = _local_rope(random)["rope_parameters"]
    if random.random() < 0.8:
        proportional = {"rope_type": "proportional", "partial_rotary_factor": random.choice([0.25, 0.5, 1.0])}
        rope["full_attention"] = {**proportional, "rope_theta": 100.0, "factor": random.choice([1.0, 2.5])}
    return {
        "model_type": "gemma4_text", **_common(random), "rope_parameters": rope, "num_hidden_layers": layers,
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


def gemma4(random: Random) -> dict[str, Any]:
    vision = {"model_type": "gemma4_vision", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
              "num_key_value_heads": 2, "pooling_kernel_size": 2, "position_embedding_size": 8}  # fmt: skip
    return {**_beside_vision(gemma4_text(random), **vision), "model_type": "gemma4"}


def mimo_v2_flash(random: Random) -> dict[str, Any]:
    groups, group_size = random.randint(1, 3), random.randint(2, 3)
    top_groups = random.randint(1, groups)
    kv_heads = random.randint(1, 2)
    heads = 2 * kv_heads * random.randint(1, 2)
    layer_types = ["full_attention", *(random.choice(["full_attention", "sliding_attention"]) for _ in range(2))]
    return {
        "model_type": "mimo_v2_flash", **_common(random), **_local_rope(random, 0.5), "num_hidden_layers": 3,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8 * random.randint(1, 2),
        "v_head_dim": random.randint(3, 9), "attention_bias": random.random() < 0.5,
        "attention_value_scale": random.choice([0.707, None]), "sliding_window": random.choice([2, 5]),
        "layer_types": layer_types, "mlp_layer_types": random.choice([None, ["sparse", "dense", "sparse"]]),
        "intermediate_size": random.randint(3, 20), "moe_intermediate_size": random.randint(3, 20),
        "n_routed_experts": groups * group_size, "num_experts_per_tok": random.randint(1, top_groups * group_size),
        "n_group": groups, "topk_group": top_groups, "norm_topk_prob": random.random() < 0.5,
        "routed_scaling_factor": random.choice([1.0, 2.5]),
    }  # fmt: skip


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
        **config, **_local_rope(random), "model_type": "mellum", "num_hidden_layers": 3,
        "mlp_layer_types": _layer_types(random),
        "sliding_window": random.choice([2, 5]),
        "layer_types": random.choices(["full_attention", "sliding_attention"], k=3),
    }  # fmt: skip


def phimoe(random: Random) -> dict[str, Any]:
    """LongRoPE of two lengths beyond all sequences, as transformers 5.24 always applies the short factors; else of
    factors that are the same for both lengths."""
    heads = _heads(random, head_dim=random.random() < 0.5)
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
        "model_type": "phimoe", **_common(random), **heads, "rope_parameters": {**rope, "rope_theta": 1e4},
        "intermediate_size": random.randint(3, 20), "num_local_experts": random.randint(2, 9),
        "num_experts_per_tok": 2, "sliding_window": random.choice([None, 7]),
        "router_jitter_noise": random.choice([0.01, 0.3, 2.0]), "attention_bias": random.random() < 0.7,
        "lm_head_bias": random.random() < 0.7,
        "max_position_embeddings": 256,
    }  # fmt: skip


def llama4_text(random: Random) -> dict[str, Any]:
    """Chunks that end within short documents. Scaling of queries begins after the padding of these tests, which
    transformers counts."""
    experts, top_k = _experts(random)
    layers = random.randint(2, 4)
    rotary = [*random.choices([0, 1], k=layers - 1), random.choice([0, 1, 1])]
    rope = _rope(random)["rope_parameters"]
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
        "model_type": "llama4_text", **_common(random), **_heads(random), "rope_parameters": rope,
        "num_hidden_layers": layers, **placement, **sparse, "attention_chunk_size": chunk,
        "intermediate_size": random.randint(3, 20), "intermediate_size_mlp": random.randint(3, 20),
        "num_local_experts": experts, "num_experts_per_tok": top_k, "attention_bias": random.random() < 0.5,
        "use_qk_norm": random.random() < 0.7, "attn_temperature_tuning": random.random() < 0.7,
        "floor_scale": random.choice([13, 20]), "attn_scale": random.choice([0.1, 2.0]),
        "pad_token_id": random.choice([None, 18]),
    }  # fmt: skip


def llama4(random: Random) -> dict[str, Any]:
    vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "vision_output_dim": 8,
              "projector_input_dim": 8, "projector_output_dim": 8, "pixel_shuffle_ratio": 0.5}  # fmt: skip
    return {**_beside_vision(llama4_text(random), **vision), "model_type": "llama4"}


FAMILIES: dict[str, Make] = {
    make.__name__: make
    for make in (
        mixtral,
        qwen2_moe,
        qwen3_moe,
        olmoe,
        deepseek_v2,
        deepseek_v3,
        gpt_oss,
        glm4_moe,
        minimax_m2,
        granitemoe,
        granitemoeshared,
        qwen3_next,
        qwen3_5_moe_text,
        qwen3_5_moe,
        lfm2_moe,
        granitemoehybrid,
        qwen3_vl_moe,
        glm4v_moe,
        kimi_k25,
        mistral3,
        nemotron_h,
        llama,
        qwen3,
        mistral,
        qwen2,
        gemma3_text,
        gemma3,
        gemma4_text,
        gemma4,
        mimo_v2_flash,
        dots1,
        hy_v3,
        solar_open,
        glm4_moe_lite,
        sarvam_moe,
        sarvam_mla,
        deepseek_v32,
        glm_moe_dsa,
        mistral4,
        ernie4_5_moe,
        hunyuan_v1_moe,
        flex_olmo,
        exaone_moe,
        bailing_moe_v2,
        llama4_text,
        llama4,
        flint,
        mellum,
        phimoe,
    )
}
WITH_ADAPTERS = {name: make for name, make in FAMILIES.items() if name != "bailing_moe_v2"}
"""Families whose adapters have a format in PEFT: the others have no class in transformers."""
