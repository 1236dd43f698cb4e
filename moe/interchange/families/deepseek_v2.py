"""DeepSeek-V2 (arXiv 2405.04434)."""

from moe.interchange.families.decoder import (
    DECODER,
    DENSE,
    FULL_LAYERS,
    FUSED,
    LATENT,
    STACK,
    experts,
    router,
    shared_experts,
)
from moe.interchange.family import Family
from moe.interchange.fields import (
    ExpertGroups,
    FirstDense,
    Key,
    Optional,
    SharedExpertCount,
    Switch,
    WriteOnlyKey,
    always,
)
from moe.interchange.rope import Rope

LATENT_KEYS = (
    Key("num_attention_heads", "attention.num_heads"),
    Optional("q_lora_rank", "attention.query_rank", int),
    Key("kv_lora_rank", "attention.key_value_rank"),
    Key("qk_nope_head_dim", "attention.head_dim"),
    Key("qk_rope_head_dim", "attention.rope_dim"),
    Key("v_head_dim", "attention.value_dim"),
    Switch("attention_bias", ("attention.bias",)),
    WriteOnlyKey("num_key_value_heads", "attention.num_heads", int),
    always(attention__kind="latent"),
)
LATENT_UNUSED = {
    "head_dim": "qk_nope_head_dim, qk_rope_head_dim and v_head_dim have the widths",
    "qk_head_dim": "it is the sum of qk_nope_head_dim and qk_rope_head_dim",
}

DEEPSEEK_V2 = Family(
    model_types=("deepseek_v2",),
    architecture="DeepseekV2ForCausalLM",
    defaults={
        "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "max_position_embeddings": 2048, "attention_bias": False, "first_k_dense_replace": 0, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "n_group": None, "n_routed_experts": 64, "n_shared_experts": 2,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "routed_scaling_factor": 1.0, "topk_group": None,
        "topk_method": "greedy", "v_head_dim": 128, "moe_intermediate_size": 1407,
    },
    fields=(
        *DECODER,
        FULL_LAYERS,
        *LATENT_KEYS,
        Rope(pairing="interleaved"),
        FirstDense(),
        SharedExpertCount(),
        Key("n_routed_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        ExpertGroups(method=True),
        Key("routed_scaling_factor", "moe.routed_scaling_factor", float),
        always(
            moe__router="softmax_topk", moe__renormalize_gates=False, moe__activation="swiglu",
            moe__aux_coefficient=0.0,
        ),
    ),
    # transformers ignores `norm_topk_prob`, the hub's own code does not: true would be ambiguous.
    only={"norm_topk_prob": (False,), "scoring_func": ("softmax",), "moe_layer_freq": (1,), "mlp_bias": (False,)},
    unused_keys=LATENT_UNUSED,
    aliases={"num_experts": "n_routed_experts"},
    tensors=(
        *STACK,
        *LATENT,
        *DENSE,
        *router("mlp.gate.weight"),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *shared_experts("mlp.shared_experts"),
    ),
    fused_tensors=FUSED,
    constant_keys={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
)  # fmt: skip
