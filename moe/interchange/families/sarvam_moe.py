"""Sarvam-30B: GLM-4.5 with other names, which rotates whole heads."""

from dataclasses import replace

from moe.interchange.families.decoder import (
    ATTENTION,
    DECODER,
    DENSE,
    FULL_LAYERS,
    FUSED,
    PACKED_ATTENTION,
    STACK,
    experts,
    router,
    selection_bias,
    shared_experts,
)
from moe.interchange.families.glm4_moe import EXPERT_FIELDS, GLM4_MOE
from moe.interchange.family import Family
from moe.interchange.fields import FirstDense, Heads, Switch
from moe.interchange.rope import Rope

_EMBEDDING, *_REST = STACK
PACKED_TENSORS = (
    replace(_EMBEDDING, tensor_name="model.word_embeddings.weight"),
    *_REST,
    *PACKED_ATTENTION,
    *DENSE,
    *router("mlp.gate.weight"),
    *selection_bias("mlp.gate.expert_bias"),
    *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *shared_experts("mlp.shared_experts"),
)

SARVAM_MOE = Family(
    model_types=("sarvam_moe",),
    architecture="SarvamMoEForCausalLM",
    defaults={
        **GLM4_MOE.defaults, "vocab_size": 262_144, "intermediate_size": 8192, "num_hidden_layers": 19,
        "num_attention_heads": 64, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "moe_intermediate_size": 1024,
        "num_experts_per_tok": 6, "routed_scaling_factor": 2.5, "use_qk_norm": True,
    },
    fields=(
        *DECODER,
        FULL_LAYERS,
        Heads(head_dim=64),
        Rope(base=8e6, fraction=1.0),
        Switch("attention_bias", ("attention.bias",)),  # the output projection has none
        Switch("use_qk_norm", ("attention.query_key_norm",), true_value="head", false_value=None),
        FirstDense(),
        *EXPERT_FIELDS,
    ),
    only={
        "use_bias": (False,), "score_function": ("sigmoid",), "moe_router_enable_expert_bias": (True,),
        "moe_router_enable_routed_scaling": (True,), "attn_implementation": ("eager", "sdpa", "flash_attention_2"),
    },
    unused_keys=GLM4_MOE.unused_keys,
    aliases={
        "num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias",
    },
    tensors=PACKED_TENSORS,
    fused_tensors=(
        _EMBEDDING, *ATTENTION, *selection_bias("mlp.gate.e_score_correction_bias"), *FUSED,
    ),
)  # fmt: skip
