"""Dimensions of published models, from their papers and released configurations.

Sources: Mixtral arXiv 2401.04088; Qwen3 arXiv 2505.09388; Qwen3-Next, Qwen3.5, GLM-4.7-Flash, Granite 4, Mistral Small
4, ERNIE 4.5, Hunyuan-A13B, MiMo-V2-Flash, Llama 4, Gemma 4, Ling, Ling 2.0, Sarvam, Mistral-7B v0.3, Qwen2.5-7B and
Gemma-3-1B, their released configurations; dots.llm1 arXiv 2506.05767; FlexOlmo arXiv 2507.07024; Phi-3.5-MoE arXiv
2404.14219; LFM2 arXiv 2511.23404; Nemotron 3 arXiv 2512.20848; DeepSeek-V2 arXiv 2405.04434; DeepSeek-V3 arXiv
2412.19437; DeepSeek-V3.2 arXiv 2512.02556; GLM-5 arXiv 2602.15763; OLMoE arXiv 2409.02060; GPT-OSS arXiv 2508.10925;
Kimi K2 arXiv 2507.20534; GLaM arXiv 2112.06905; Switch-C arXiv 2101.03961; NLLB-MoE arXiv 2207.04672. Token groups of
language models are sequences of 4,096 tokens.
"""

from typing import Any

_GROUP_TOKENS = 4096


def _grouped_query(num_heads: int, num_kv_heads: int, head_dim: int, **fields: Any) -> dict[str, Any]:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return {"kind": "grouped_query", **heads, **fields}


def _latent(num_heads: int, rope: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """MLA, by default with the dimensions of DeepSeek and Kimi."""
    return {"kind": "latent", "num_heads": num_heads, "query_rank": 1536, "key_value_rank": 512, "head_dim": 128,
            "rope_dim": 64, "value_dim": 128, "rope": {"pairing": "interleaved", **rope}, **fields}  # fmt: skip


def _yarn(base: float, **yarn: Any) -> dict[str, Any]:
    return {"base": base, "scaling": {"kind": "yarn", "original_tokens": 4096, **yarn}}


def _indexer(num_heads: int, **fields: Any) -> dict[str, Any]:
    """Lightning indexer, frozen until `loss_coefficient` is set."""
    return {"num_heads": num_heads, "head_dim": 128, "top_k": 2048, **fields}


def _glm_5(base: float, **indexer: Any) -> dict[str, Any]:
    """GLM-5 and its successors, which differ in RoPE and in layers that share a selection."""
    attention = _latent(64, {"base": base}, query_rank=2048, head_dim=192, value_dim=256,
                        indexer=_indexer(32, pairing="interleaved", **indexer))  # fmt: skip
    moe = _experts(256, 8, 2048, router="sigmoid_topk", shared_hidden_dim=2048, routed_scaling_factor=2.5)
    return _language(6144, 78, 154_880, attention, moe, ffn_dim=12_288, first_dense_layers=3, norm_eps=1e-5)


def _mimo(num_kv_heads: int, base: float, **fields: Any) -> dict[str, Any]:
    """Attention of MiMo-V2-Flash, in layers with or without a window."""
    rope = {"base": base, "fraction": 0.334}
    return _grouped_query(64, num_kv_heads, 192, value_dim=128, value_multiplier=0.707, rope=rope, **fields)


def _gemma4(num_kv_heads: int, head_dim: int, **fields: Any) -> dict[str, Any]:
    """Attention of Gemma 4, in layers with or without a window."""
    return _grouped_query(16, num_kv_heads, head_dim, query_key_norm="head", value_norm=True, scale=1.0, **fields)


def _gemma3(window: int | None = None, **fields: Any) -> dict[str, Any]:
    """Attention of Gemma 3 with one billion weights, in layers with or without a window."""
    return _grouped_query(4, 1, 256, query_key_norm="head", scale=1 / 16, window=window, **fields)


def _gpt_oss(num_layers: int, num_experts: int) -> dict[str, Any]:
    """GPT-OSS; its two sizes differ only in these numbers."""
    scaling = {"kind": "yarn", "factor": 32.0, "original_tokens": 4096, "truncate": False}
    attention = _grouped_query(
        64, 8, 64, bias=True, output_bias=True, sinks=True, window=128, rope={"base": 1.5e5, "scaling": scaling}
    )  # fmt: skip
    moe = _experts(
        num_experts, 4, 2880, softmax="after_topk", activation="swiglu_clamped", expert_bias=True, logit_bias=True
    )
    return _language(2880, num_layers, 201_088, attention, moe, norm_eps=1e-5)


def _llama_4(num_experts: int, rope: dict[str, Any], qk_norm: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Llama 4: three of four layers attend in chunks, the fourth to all tokens without positions."""
    return _language(
        5120, 48, 202_048,
        _grouped_query(40, 8, 128, rope={"fraction": 0.0},
                       query_scaling={"coefficient": 0.1, "tokens": 8192, "first_position": 1}),
        _experts(num_experts, 1, 8192, router="sigmoid_topk", renormalize_gates=False, bias_update_rate=0.0,
                 apply_gates_to="inputs", shared_hidden_dim=8192),
        local_attention=_grouped_query(
            40, 8, 128, rope={"base": 5e5, "pairing": "interleaved", **rope}, window=8192, window_kind="chunk",
            windowed_layers=[layer for layer in range(48) if layer % 4 != 3], **qk_norm,
        ),
        norm_eps=1e-5, **fields,
    )  # fmt: skip


def _qwen3(model_dim: int, num_layers: int, num_heads: int, hidden_dim: int, base: float) -> dict[str, Any]:
    """Qwen3 mixtures, and the language models of Qwen3-VL, which differ in the base of RoPE."""
    attention = _grouped_query(num_heads, 4, 128, query_key_norm="head", rope={"base": base})
    return _language(model_dim, num_layers, 151_936, attention, _experts(128, 8, hidden_dim))


def _kimi(norm_eps: float, **yarn: Any) -> dict[str, Any]:
    """Kimi K2, and the language model of Kimi-K2.5, which differ in RoPE and norms."""
    attention = _latent(64, _yarn(5e4, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, **yarn))
    moe = _experts(384, 8, 2048, router="sigmoid_topk", shared_hidden_dim=2048, routed_scaling_factor=2.827)
    return _language(7168, 61, 163_840, attention, moe, ffn_dim=18_432, first_dense_layers=1, norm_eps=norm_eps)


def _qwen3_5(
    model_dim: int, num_layers: int, num_heads: int, value_heads: int, num_experts: int, top_k: int, hidden_dim: int
) -> dict[str, Any]:
    """Qwen3.5 and Qwen3.6 mixtures, whose sizes differ only in these numbers."""
    rope = {"base": 1e7, "fraction": 0.25}
    attention = _grouped_query(num_heads, 2, 256, query_key_norm="head", output_gate=True, rope=rope)
    linear = {"num_key_heads": 16, "num_value_heads": value_heads, "key_dim": 128, "value_dim": 128,
              "split_projections": True}  # fmt: skip
    moe = _experts(num_experts, top_k, hidden_dim, shared_hidden_dim=hidden_dim, shared_gate=True)
    return _language(
        model_dim, num_layers, 248_320, attention, moe, linear_attention=linear, full_attention_every=4,
        norm_one_plus=True,
    )  # fmt: skip


def _granite4(
    model_dim: int,
    num_heads: int,
    num_kv_heads: int,
    num_experts: int,
    top_k: int,
    hidden_dim: int,
    shared_dim: int,
    **fields: Any,
) -> dict[str, Any]:
    """Granite 4 with experts; its Mamba-2 heads are twice as wide as the model."""
    mamba2 = {"kind": "mamba2", "num_heads": 2 * model_dim // 64, "head_dim": 64, "state_dim": 128}
    return _language(
        model_dim, 40, 100_352, _grouped_query(num_heads, num_kv_heads, 128, scale=1 / 128, rope={"fraction": 0.0}),
        _experts(num_experts, top_k, hidden_dim, softmax="after_topk", shared_hidden_dim=shared_dim),
        linear_attention=mamba2, attention_layers=(5, 15, 25, 35), tie_embeddings=True, norm_eps=1e-5,
        embedding_multiplier=12.0, residual_multiplier=0.22, **fields,
    )  # fmt: skip


def _nemotron_layers(pattern: str) -> dict[str, Any]:
    """Fields of layers with attention (`*`), experts (E) and Mamba-2 (M)."""
    return {"attention_layers": [layer for layer, letter in enumerate(pattern) if letter == "*"],
            "feed_forward_layers": [layer for layer, letter in enumerate(pattern) if letter == "E"]}  # fmt: skip


def _experts(num_experts: int, top_k: int | None, hidden_dim: int, **fields: Any) -> dict[str, Any]:
    """Gated experts; `top_k` is None if the router has a fixed number of choices."""
    choices = {} if top_k is None else {"top_k": top_k}
    return {"router": "softmax_topk", "num_experts": num_experts, **choices, "hidden_dim": hidden_dim,
            "activation": "swiglu", "group_tokens": _GROUP_TOKENS, **fields}  # fmt: skip


def _language(
    model_dim: int, num_layers: int, vocab_size: int, attention: dict[str, Any], moe: dict[str, Any], **fields: Any
) -> dict[str, Any]:
    return {**_dense(model_dim, num_layers, vocab_size, attention, **fields), "moe": moe}


def _dense(
    model_dim: int, num_layers: int, vocab_size: int, attention: dict[str, Any], **fields: Any
) -> dict[str, Any]:
    """Language model without experts."""
    return {"kind": "language", "model_dim": model_dim, "num_layers": num_layers, "vocab_size": vocab_size,
            "attention": attention, **fields}  # fmt: skip


def _translation(num_layers_each: int, vocab_size: int, **fields: Any) -> dict[str, Any]:
    return {"num_encoder_layers": num_layers_each, "num_decoder_layers": num_layers_each,
            "source_vocab_size": vocab_size, "target_vocab_size": vocab_size, **fields}  # fmt: skip


PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": _language(
        4096, 32, 32_000, _grouped_query(32, 8, 128, rope={"base": 1e6}), _experts(8, 2, 14_336, softmax="after_topk"),
        norm_eps=1e-5,
    ),
    "mixtral-8x22b": _language(
        6144, 56, 32_768, _grouped_query(48, 8, 128, rope={"base": 1e6}), _experts(8, 2, 16_384, softmax="after_topk"),
        norm_eps=1e-5,
    ),
    "qwen3-30b-a3b": _qwen3(2048, 48, 32, 768, 1e6),
    "qwen3-235b-a22b": _qwen3(4096, 94, 64, 1536, 1e6),
    "qwen3-vl-30b-a3b": _qwen3(2048, 48, 32, 768, 5e6),
    "qwen3-vl-235b-a22b": _qwen3(4096, 94, 64, 1536, 5e6),
    "qwen3-next-80b-a3b": _language(
        2048, 48, 151_936,
        _grouped_query(16, 2, 256, query_key_norm="head", output_gate=True, rope={"base": 1e7, "fraction": 0.25}),
        _experts(512, 10, 512, shared_hidden_dim=512, shared_gate=True),
        linear_attention={"num_key_heads": 16, "num_value_heads": 32, "key_dim": 128, "value_dim": 128},
        full_attention_every=4, norm_one_plus=True,
    ),
    "qwen3.5-35b-a3b": _qwen3_5(2048, 40, 16, 32, 256, 8, 512),
    "qwen3.5-397b-a17b": _qwen3_5(4096, 60, 32, 64, 512, 10, 1024),
    "granite-4.0-h-small": _granite4(4096, 32, 8, 72, 10, 768, 1536, logits_divisor=16.0),
    "granite-4.0-h-tiny": _granite4(1536, 12, 4, 64, 6, 512, 1024, logits_divisor=6.0),
    "nemotron-3-nano-30b-a3b": _language(
        2688, 52, 131_072, _grouped_query(32, 2, 128, rope={"fraction": 0.0}),
        _experts(128, 6, 1856, router="sigmoid_topk", activation="relu2", shared_hidden_dim=3712,
                 routed_scaling_factor=2.5),
        linear_attention={"kind": "mamba2", "num_heads": 64, "head_dim": 64, "state_dim": 128, "num_groups": 8,
                          "min_time_step": 0.001},
        **_nemotron_layers("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"), norm_eps=1e-5,
    ),
    "lfm2-8b-a1b": _language(
        2048, 24, 65_536, _grouped_query(32, 8, 64, query_key_norm="head", rope={"base": 1e6}),
        _experts(32, 4, 1792, router="sigmoid_topk", renormalize_eps=1e-6),
        linear_attention={"kind": "short_convolution"}, attention_layers=(2, 6, 10, 14, 18, 21), ffn_dim=7168,
        first_dense_layers=2, tie_embeddings=True, norm_eps=1e-5,
    ),
    "deepseek-v2": _language(
        5120, 60, 102_400, _latent(128, _yarn(1e4, factor=40.0, mscale=0.707, mscale_all_dim=0.707)),
        _experts(160, 6, 1536, renormalize_gates=False, shared_hidden_dim=3072, num_expert_groups=8,
                 expert_groups_per_token=3, routed_scaling_factor=16.0),
        ffn_dim=12_288, first_dense_layers=1,
    ),
    "deepseek-v3": _language(
        7168, 61, 129_280, _latent(128, _yarn(1e4, factor=40.0, mscale=1.0, mscale_all_dim=1.0)),
        _experts(256, 8, 2048, router="sigmoid_topk", shared_hidden_dim=2048, num_expert_groups=8,
                 expert_groups_per_token=4, routed_scaling_factor=2.5),
        ffn_dim=18_432, first_dense_layers=3,
    ),
    "deepseek-v3.2": _language(
        7168, 61, 129_280,
        _latent(128, _yarn(1e4, factor=40.0, mscale=1.0, mscale_all_dim=1.0), indexer=_indexer(64)),
        _experts(256, 8, 2048, router="sigmoid_topk", shared_hidden_dim=2048, num_expert_groups=8,
                 expert_groups_per_token=4, routed_scaling_factor=2.5),
        ffn_dim=18_432, first_dense_layers=3,
    ),
    "glm-5": _glm_5(1e6),
    "glm-5.2": _glm_5(8e6, shared_layers=[layer for layer in range(3, 78) if layer % 4 != 2]),
    "mistral-small-4": _language(
        4096, 36, 131_072,
        _latent(32, _yarn(1e4, factor=128.0, original_tokens=8192, mscale=1.0, mscale_all_dim=1.0), query_rank=1024,
                key_value_rank=256, head_dim=64, query_scaling={"coefficient": 0.1, "tokens": 8192}),
        _experts(128, 4, 2048, shared_hidden_dim=2048),
    ),
    "ernie-4.5-21b-a3b": _language(
        2560, 28, 103_424, _grouped_query(20, 4, 128, rope={"base": 5e5, "pairing": "interleaved"}),
        _experts(64, 6, 1536, shared_hidden_dim=3072, bias_update_rate=0.001),
        ffn_dim=12_288, first_dense_layers=1, norm_eps=1e-5, tie_embeddings=True,
    ),
    "hunyuan-a13b": _language(
        4096, 32, 128_167,
        _grouped_query(32, 8, 128, query_key_norm="head", norm_after_rope=True,
                       rope={"base": 1e4 * 1000 ** (128 / 126)}),
        _experts(64, 8, 3072, shared_hidden_dim=3072), norm_eps=1e-5, tie_embeddings=True,
    ),
    "glm-4.7-flash": _language(
        2048, 47, 154_880, _latent(20, {"base": 1e6}, query_rank=768, head_dim=192, value_dim=256),
        _experts(64, 4, 1536, router="sigmoid_topk", shared_hidden_dim=1536, routed_scaling_factor=1.8),
        ffn_dim=10_240, first_dense_layers=1, norm_eps=1e-5,
    ),
    "dots.llm1": _language(
        4096, 62, 152_064, _grouped_query(32, 32, 128, query_key_norm="head", rope={"base": 1e7}),
        _experts(128, 6, 1408, router="sigmoid_topk", shared_hidden_dim=2816, routed_scaling_factor=2.5),
        ffn_dim=10_944, first_dense_layers=1, norm_eps=1e-5,
    ),
    "ling-mini-2.0": _language(
        2048, 20, 157_184, _grouped_query(16, 4, 128, query_key_norm="head", rope={"base": 6e5, "fraction": 0.5}),
        _experts(256, 8, 512, router="sigmoid_topk", shared_hidden_dim=512, num_expert_groups=8,
                 expert_groups_per_token=4, routed_scaling_factor=2.5),
        ffn_dim=5120, first_dense_layers=1,
    ),
    "ling-lite": _language(
        2048, 28, 126_464, _grouped_query(16, 4, 128, rope={"base": 6e5}),
        _experts(64, 6, 1408, shared_hidden_dim=2816), norm_eps=1e-5, normalize_output=True,
    ),
    "sarvam-30b": _language(
        4096, 19, 262_144, _grouped_query(64, 4, 64, query_key_norm="head", rope={"base": 8e6}),
        _experts(128, 6, 1024, router="sigmoid_topk", shared_hidden_dim=1024, routed_scaling_factor=2.5),
        ffn_dim=8192, first_dense_layers=1,
    ),
    "sarvam-105b": _language(
        4096, 32, 262_144,
        _latent(64, _yarn(1e4, factor=40.0, mscale=1.0, mscale_all_dim=1.0), query_rank=None),
        _experts(128, 8, 2048, router="sigmoid_topk", shared_hidden_dim=2048, routed_scaling_factor=2.5),
        ffn_dim=16_384, first_dense_layers=1,
    ),
    "flexolmo-7x7b": _language(
        4096, 32, 100_352, _grouped_query(32, 32, 128, query_key_norm="width", rope={"base": 5e5}),
        _experts(7, 5, 11_008, renormalize_gates=False), norm_placement="post",
    ),
    "olmoe-1b-7b": _language(
        2048, 16, 50_304, _grouped_query(16, 16, 128, query_key_norm="width"),
        _experts(64, 8, 1024, renormalize_gates=False, z_coefficient=0.001), norm_eps=1e-5,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "kimi-k2": _kimi(1e-6, factor=32.0, beta_fast=1.0),
    "kimi-k2.5": _kimi(1e-5, factor=64.0, beta_fast=32.0),
    "mimo-v2-flash": _language(
        4096, 48, 152_576, _mimo(4, 5e6),
        _experts(256, 8, 2048, router="sigmoid_topk"),
        local_attention=_mimo(8, 1e4, sinks=True, window=129,
                              windowed_layers=[layer for layer in range(1, 48) if (layer + 1) % 6]),
        ffn_dim=16_384, first_dense_layers=1, norm_eps=1e-5,
    ),
    "llama-4-scout-17b-16e": _llama_4(
        16, {"scaling": {"kind": "llama3", "factor": 8.0, "original_tokens": 8192}},
        {"query_key_norm": "unscaled", "norm_after_rope": True},
    ),
    "llama-4-maverick-17b-128e": _llama_4(128, {}, {}, ffn_dim=16_384, moe_every=2),
    "gemma-4-26b-a4b": _language(
        2816, 30, 262_144,
        _gemma4(2, 512, keys_as_values=True, rope={"base": 1e6, "fraction": 0.25, "proportional": True}),
        _experts(128, 8, 704, activation="geglu_tanh", shared_hidden_dim=2112, router_norm=True, expert_scale=True,
                 branch_norms=True),
        local_attention=_gemma4(8, 256, window=1024, windowed_layers=[layer for layer in range(30) if (layer + 1) % 6]),
        norm_placement="sandwich", embedding_multiplier="sqrt_model_dim", logits_cap=30.0, layer_scalar=True,
        tie_embeddings=True,
    ),
    # The factors of LongRoPE belong to released weights, which `from` reads with them.
    "phi-3.5-moe": _language(
        4096, 32, 32_064, _grouped_query(32, 8, 128, bias=True, output_bias=True),
        _experts(16, None, 6400, router="sparsemixer"), norm_kind="layer", norm_eps=1e-5, output_bias=True,
    ),
    "mistral-7b": _dense(
        4096, 32, 32_768, _grouped_query(32, 8, 128, rope={"base": 1e6}), ffn_dim=14_336, norm_eps=1e-5
    ),
    "qwen2.5-7b": _dense(3584, 28, 152_064, _grouped_query(28, 4, 128, bias=True, rope={"base": 1e6}), ffn_dim=18_944),
    "gemma-3-1b": _dense(
        1152, 26, 262_144, _gemma3(rope={"base": 1e6}),
        local_attention=_gemma3(512, windowed_layers=[layer for layer in range(26) if (layer + 1) % 6]),
        ffn_dim=6912, ffn_activation="geglu_tanh", norm_placement="sandwich", norm_one_plus=True,
        embedding_multiplier="sqrt_model_dim", tie_embeddings=True,
    ),
    # 64B/64E: experts (two matrices) in every other layer; the dense layers are gated.
    "glam-64b-64e": _language(
        8192, 64, 256_000, _grouped_query(128, 128, 128),
        {"num_experts": 64, "hidden_dim": 32_768, "activation": "gelu", "group_tokens": _GROUP_TOKENS},
        ffn_dim=32_768, ffn_activation="geglu", moe_every=2, tie_embeddings=True,
    ),
    "switch-c": _translation(
        15, 32_128, model_dim=2080, num_heads=32, head_dim=64, ffn_dim=6144, moe_every=1,
        moe={"router": "switch_top1", "num_experts": 2048, "hidden_dim": 6144, "group_tokens": 2048},
    ),
    "nllb-moe-54b": _translation(
        24, 256_206, model_dim=2048, num_heads=16, head_dim=128, ffn_dim=8192, moe_every=4,
        moe={"num_experts": 128, "hidden_dim": 8192, "group_tokens": 2048},
    ),
}  # fmt: skip
