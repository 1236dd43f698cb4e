"""OLMoE (arXiv 2409.02060)."""

from moe.interchange.families.decoder import ATTENTION, AUXILIARY, DECODER, FULL_LAYERS, FUSED, STACK, experts, router
from moe.interchange.family import Family
from moe.interchange.fields import Heads, Key, Optional, Switch, always
from moe.interchange.rope import Rope

TENSORS = (*ATTENTION, *router("mlp.gate.weight"), *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"))

OLMOE = Family(
    model_types=("olmoe",),
    architecture="OlmoeForCausalLM",
    defaults={
        "vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": None, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "max_position_embeddings": 4096, "attention_bias": False, "clip_qkv": None, "num_experts_per_tok": 8,
        "num_experts": 64, "norm_topk_prob": False,
    },
    fields=(
        *DECODER,
        FULL_LAYERS,
        Heads(),
        Rope(),
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        Optional("clip_qkv", "attention.clip"),
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("intermediate_size", "moe.hidden_dim"),
        Key("norm_topk_prob", "moe.renormalize_gates", bool),
        always(attention__query_key_norm="width", moe__router="softmax_topk", moe__activation="swiglu"),
        *AUXILIARY,
    ),
    only={"sliding_window": ()},
    aliases={"num_local_experts": "num_experts"},
    tensors=(*STACK, *TENSORS),
    fused_tensors=FUSED,
)  # fmt: skip
