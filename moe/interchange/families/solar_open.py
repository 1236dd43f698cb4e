"""Solar-Open: GLM-4.5 without dense layers, which rotates whole heads."""

from moe.interchange.families.decoder import DECODER, FULL_LAYERS
from moe.interchange.families.deepseek_v3 import EXPERT_FIELDS, MTP_KEYS
from moe.interchange.families.glm4_moe import GLM4_MOE
from moe.interchange.family import Family
from moe.interchange.fields import Heads, Switch
from moe.interchange.rope import Rope

SOLAR_OPEN = Family(
    model_types=("solar_open",),
    architecture="SolarOpenForCausalLM",
    defaults={
        "vocab_size": 196_608, "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64,
        "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "attention_bias": False, "moe_intermediate_size": 1280,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    },
    fields=(
        *DECODER,
        FULL_LAYERS,
        Heads(head_dim=128),
        Rope(base=1e6),
        Switch("attention_bias", ("attention.bias",)),  # the output projection has none
        *EXPERT_FIELDS,
    ),
    only={"first_k_dense_replace": (0,), "use_qk_norm": (False,)},
    unused_keys=MTP_KEYS | {"intermediate_size": "every layer has experts"},
    new_config_keys={"partial_rotary_factor": 1.0},
    aliases=GLM4_MOE.aliases,
    tensors=GLM4_MOE.tensors,
    fused_tensors=GLM4_MOE.fused_tensors,
)  # fmt: skip
