"""DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3 with sparse attention."""

from moe.interchange.families.decoder import (
    DECODER,
    DENSE,
    FUSED,
    INDEXER,
    LATENT,
    STACK,
    experts,
    router,
    selection_bias,
    shared_experts,
)
from moe.interchange.families.deepseek_v2 import LATENT_KEYS, LATENT_UNUSED
from moe.interchange.families.deepseek_v3 import FURTHER_TOKENS, SIGMOID
from moe.interchange.family import Family
from moe.interchange.fields import DenseLayers, ExpertGroups, Key, SharedExpertCount, always
from moe.interchange.layer_types import EveryLayer
from moe.interchange.rope import Rope

SPARSE_FIELDS = (
    *DECODER,
    EveryLayer("layer_types", "indexed_attention"),
    *LATENT_KEYS,
    Key("index_n_heads", "attention.indexer.num_heads"),
    Key("index_head_dim", "attention.indexer.head_dim"),
    Key("index_topk", "attention.indexer.top_k"),
    always(attention__indexer__loss_coefficient=0.0),
    Rope(pairing="interleaved"),
    DenseLayers(ignores_first=True),
    SharedExpertCount(),
    Key("n_routed_experts", "moe.num_experts"),
    Key("num_experts_per_tok", "moe.top_k"),
    Key("moe_intermediate_size", "moe.hidden_dim"),
    ExpertGroups(),
    Key("norm_topk_prob", "moe.renormalize_gates", bool),
    Key("routed_scaling_factor", "moe.routed_scaling_factor", float),
    SIGMOID,
)
"""The indexer is loaded and stays frozen, as in transformers; to train it, set
`attention: {indexer: {loss_coefficient: 1.0}}` next to `from`."""

SPARSE_TENSORS = (
    *STACK,
    *LATENT,
    *INDEXER,
    *DENSE,
    *router("mlp.gate.weight"),
    *selection_bias("mlp.gate.e_score_correction_bias"),
    *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *shared_experts("mlp.shared_experts"),
)

SPARSE_ONLY = {
    "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,), "rope_interleave": (True,),
}  # fmt: skip
SPARSE_CONSTANTS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
SPARSE_ALIASES = {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}

DEEPSEEK_V32 = Family(
    model_types=("deepseek_v32",),
    architecture="DeepseekV32ForCausalLM",
    defaults={
        "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "max_position_embeddings": 163_840, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False, "index_topk": 2048, "index_head_dim": 128,
        "index_n_heads": 64,
    },
    fields=(*SPARSE_FIELDS, always(attention__indexer__pairing="half")),
    only={**SPARSE_ONLY, "indexer_rope_interleave": (False,)},
    unused_keys=LATENT_UNUSED | FURTHER_TOKENS,
    aliases=SPARSE_ALIASES,
    tensors=SPARSE_TENSORS,
    fused_tensors=FUSED,
    extra_head_pattern="model.layers.{beyond}.",
    new_config_keys={"num_nextn_predict_layers": 0},
    constant_keys=SPARSE_CONSTANTS,
)  # fmt: skip
