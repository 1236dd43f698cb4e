"""GPT-OSS (arXiv 2508.10925)."""

from moe.interchange.families.decoder import ATTENTION, AUXILIARY, DECODER, STACK, router
from moe.interchange.family import Family, TensorRow, in_layers, part
from moe.interchange.fields import Heads, Key, Switch, always
from moe.interchange.layer_types import Windows
from moe.interchange.rope import Rope

GPT_OSS = Family(
    model_types=("gpt_oss",),
    architecture="GptOssForCausalLM",
    defaults={
        "num_hidden_layers": 36, "num_local_experts": 128, "vocab_size": 201_088, "hidden_size": 2880,
        "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
        "sliding_window": 128, "tie_word_embeddings": False, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "num_experts_per_tok": 4, "attention_bias": True, "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    fields=(
        *DECODER,
        Heads(head_dim=64),
        Rope(
            base=150_000.0,
            default=(
                ("rope_type", "yarn"), ("factor", 32.0), ("beta_fast", 32.0), ("beta_slow", 1.0),
                ("truncate", False), ("original_max_position_embeddings", 4096),
            ),
        ),
        Windows(selection="types", default="even"),
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        Key("num_local_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("intermediate_size", "moe.hidden_dim"),
        Key("swiglu_alpha", "moe.activation_alpha", float),
        Key("swiglu_limit", "moe.activation_limit", float),
        always(
            attention__sinks=True, moe__router="softmax_topk", moe__softmax="after_topk", moe__logit_bias=True,
            moe__activation="swiglu_clamped", moe__expert_bias=True,
        ),
        *AUXILIARY,
    ),
    unused_keys={
        "initial_context_length": "original_max_position_embeddings says the same",
        "experts_per_token": "num_experts_per_tok says the same",
    },
    aliases={"num_experts": "num_local_experts"},
    tensors=(
        *STACK,
        *ATTENTION,
        *router("mlp.router.weight"),
        *in_layers(
            TensorRow("attention.sinks", "self_attn.sinks"),
            TensorRow("feed_forward.moe.logit_bias", "mlp.router.bias"),
            # [in, out]; even columns belong to the gate.
            part("feed_forward.moe.experts.w_gate", "e m h", "mlp.experts.gate_up_proj", "e m (h 0/2)"),
            part("feed_forward.moe.experts.w_in", "e m h", "mlp.experts.gate_up_proj", "e m (h 1/2)"),
            part("feed_forward.moe.experts.b_gate", "e h", "mlp.experts.gate_up_proj_bias", "e (h 0/2)"),
            part("feed_forward.moe.experts.b_in", "e h", "mlp.experts.gate_up_proj_bias", "e (h 1/2)"),
            TensorRow("feed_forward.moe.experts.w_out", "mlp.experts.down_proj"),
            TensorRow("feed_forward.moe.experts.b_out", "mlp.experts.down_proj_bias"),
        ),
    ),
)  # fmt: skip
