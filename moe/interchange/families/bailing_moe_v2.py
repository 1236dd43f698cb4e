"""Ling 2.0: grouped-query attention with packed projections, and experts as in DeepSeek-V3."""

from moe.interchange.families.decoder import DECODER
from moe.interchange.families.deepseek_v3 import SIGMOID
from moe.interchange.families.sarvam_moe import SARVAM_MOE
from moe.interchange.family import Family
from moe.interchange.fields import ExpertGroups, FirstDense, Heads, Key, SharedExpertCount, Switch
from moe.interchange.rope import Rope

BAILING_MOE_V2 = Family(
    model_types=("bailing_moe_v2",),
    architecture="BailingMoeV2ForCausalLM",
    defaults={
        "vocab_size": 157_184, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "use_qkv_bias": False,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32_768, "num_experts": 256,
        "num_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "moe_intermediate_size": 512,
        "first_k_dense_replace": 1, "use_qk_norm": True, "routed_scaling_factor": 1.0,
    },
    fields=(
        *DECODER,
        Heads(head_dim=128),
        Rope(base=6e5, fraction=1.0),
        Switch("use_qkv_bias", ("attention.bias",)),
        Switch("use_qk_norm", ("attention.query_key_norm",), true_value="head", false_value=None),
        FirstDense(),
        SharedExpertCount("num_shared_experts"),
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        ExpertGroups(),
        Key("routed_scaling_factor", "moe.routed_scaling_factor", float),
        SIGMOID,
    ),
    only={
        "use_bias": (False,), "use_rmsnorm": (True,), "score_function": ("sigmoid",), "norm_topk_prob": (True,),
        "moe_router_enable_expert_bias": (True,), "moe_router_enable_routed_scaling": (True,), "norm_head": (False,),
        "embedding_dropout": (0,), "output_dropout": (0,),
    },
    unused_keys={
        **SARVAM_MOE.unused_keys,
        "rotary_dim": "partial_rotary_factor says the same",
        "router_dtype": "routers compute in at least float32",
        "moe_shared_expert_intermediate_size": "moe_intermediate_size and num_shared_experts determine it",
        "max_window_layers": "no layer has a window",
        "mtp_loss_scaling_factor": "multi-token-prediction heads are not trained",
        "norm_softmax": "models of this type do not read it",
    },
    aliases={
        "num_local_experts": "num_experts", "n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias",
    },
    tensors=SARVAM_MOE.tensors,
    fused_tensors=SARVAM_MOE.fused_tensors,
    mtp_pattern="model.layers.{beyond}.",
    is_in_transformers=False,
    constant_keys={"score_function": "sigmoid", "norm_topk_prob": True, "moe_router_enable_expert_bias": True},
)  # fmt: skip
