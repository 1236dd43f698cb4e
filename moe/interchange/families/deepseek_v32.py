"""DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3 with sparse attention."""

from moe.interchange.families.decoder import DECODER, DENSE, FUSED, INDEXER, LATENT, STACK
from moe.interchange.families.deepseek_v2 import LATENT_KEYS, LATENT_UNUSED
from moe.interchange.families.deepseek_v3 import DEEPSEEK_V3, EXPERT_FIELDS, EXPERT_TENSORS, MTP_KEYS
from moe.interchange.family import Family
from moe.interchange.fields import DenseLayers, Key, always
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
    *EXPERT_FIELDS,
)
"""The indexer is loaded and stays frozen, as in transformers; to train it, set
`attention: {indexer: {loss_coefficient: 1.0}}` next to `from`."""

SPARSE_TENSORS = (*STACK, *LATENT, *INDEXER, *DENSE, *EXPERT_TENSORS)

SPARSE_ONLY = {
    "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,), "rope_interleave": (True,),
}  # fmt: skip
SPARSE_CONSTANTS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
SPARSE_ALIASES = {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}

DEEPSEEK_V32 = Family(
    model_types=("deepseek_v32",),
    architecture="DeepseekV32ForCausalLM",
    defaults={
        **DEEPSEEK_V3.defaults, "max_position_embeddings": 163_840, "index_topk": 2048, "index_head_dim": 128,
        "index_n_heads": 64,
    },
    fields=(*SPARSE_FIELDS, always(attention__indexer__pairing="half")),
    only={**SPARSE_ONLY, "indexer_rope_interleave": (False,)},
    unused_keys=LATENT_UNUSED | MTP_KEYS,
    aliases=SPARSE_ALIASES,
    tensors=SPARSE_TENSORS,
    fused_tensors=FUSED,
    mtp_pattern="model.layers.{beyond}.",
    new_config_keys={"num_nextn_predict_layers": 0},
    constant_keys=SPARSE_CONSTANTS,
)  # fmt: skip
