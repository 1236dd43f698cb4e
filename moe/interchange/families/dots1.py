"""dots.llm1 (arXiv 2506.05767): Qwen3's attention, and experts as in DeepSeek-V3."""

from moe.interchange.families.decoder import DECODER
from moe.interchange.families.deepseek_v3 import EXPERT_FIELDS
from moe.interchange.families.glm4_moe import GLM4_MOE
from moe.interchange.family import Family
from moe.interchange.fields import FirstDense, Heads, Switch, always
from moe.interchange.layer_types import Windows
from moe.interchange.rope import Rope

DOTS1 = Family(
    model_types=("dots1",),
    architecture="Dots1ForCausalLM",
    defaults={
        "vocab_size": 152_064, "hidden_size": 4608, "intermediate_size": 10_944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 0, "norm_topk_prob": False, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False, "routed_scaling_factor": 1.0, "sliding_window": 4096,
        "max_window_layers": 62,
    },
    fields=(
        *DECODER,
        Heads(),
        Rope(),
        Windows(selection="types", default="from"),
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        FirstDense(),
        *EXPERT_FIELDS,
        always(attention__query_key_norm="head"),
    ),
    only={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    aliases={"num_local_experts": "n_routed_experts"},
    tensors=GLM4_MOE.tensors,
    fused_tensors=GLM4_MOE.fused_tensors,
)  # fmt: skip
