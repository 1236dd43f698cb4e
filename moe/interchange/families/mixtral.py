"""Mixtral (arXiv 2401.04088)."""

from moe.interchange.families.decoder import ATTENTION, AUXILIARY, DECODER, FUSED, STACK, experts, router
from moe.interchange.family import Family
from moe.interchange.fields import Heads, Key, always
from moe.interchange.layer_types import Windows
from moe.interchange.rope import Rope

MIXTRAL = Family(
    model_types=("mixtral",),
    architecture="MixtralForCausalLM",
    defaults={
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "max_position_embeddings": 131_072, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    fields=(
        *DECODER,
        Heads(),
        Rope(base=1e6),
        Windows(selection="all"),
        Key("num_local_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("intermediate_size", "moe.hidden_dim"),
        always(moe__router="softmax_topk", moe__renormalize_gates=True, moe__activation="swiglu"),
        *AUXILIARY,
    ),
    only={"router_jitter_noise": (0,)},
    aliases={"num_experts": "num_local_experts"},
    tensors=(
        *STACK,
        *ATTENTION,
        *router("block_sparse_moe.gate.weight"),
        *experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    fused_tensors=(*router("mlp.gate.weight"), *FUSED),
)  # fmt: skip
