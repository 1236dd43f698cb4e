"""GLM-4.5 (arXiv 2508.06471)."""

from moe.interchange.families.decoder import ATTENTION, DECODER, DENSE, FULL_LAYERS, FUSED, STACK
from moe.interchange.families.deepseek_v3 import EXPERT_FIELDS, EXPERT_TENSORS, MTP_KEYS
from moe.interchange.family import Family
from moe.interchange.fields import FirstDense, Heads, Switch
from moe.interchange.rope import Rope

GLM4_MOE = Family(
    model_types=("glm4_moe",),
    architecture="Glm4MoeForCausalLM",
    defaults={
        "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False, "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False,
    },
    fields=(
        *DECODER,
        FULL_LAYERS,
        Heads(),
        Rope(fraction=0.5),
        Switch("attention_bias", ("attention.bias",)),  # the output projection has none
        Switch("use_qk_norm", ("attention.query_key_norm",), true_value="head", false_value=None),
        FirstDense(),
        *EXPERT_FIELDS,
    ),
    unused_keys=MTP_KEYS,
    aliases={"num_local_experts": "n_routed_experts"},
    tensors=(
        *STACK,
        *ATTENTION,
        *DENSE,
        *EXPERT_TENSORS,
    ),
    fused_tensors=FUSED,
    mtp_pattern="model.layers.{beyond}.",
    new_config_keys={"num_nextn_predict_layers": 0},
)  # fmt: skip
