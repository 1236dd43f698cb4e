"""FlexOlmo (arXiv 2507.07024): OLMoE with norms after attention and experts, as in OLMo 2."""

from dataclasses import replace

from moe.interchange.families.decoder import AUXILIARY, DECODER, FULL_LAYERS, SANDWICH_STACK
from moe.interchange.families.olmoe import OLMOE, TENSORS
from moe.interchange.fields import Heads, Key, Switch, always
from moe.interchange.rope import Rope

FLEX_OLMO = replace(
    OLMOE,
    model_types=("flex_olmo",),
    architecture="FlexOlmoForCausalLM",
    defaults={
        "vocab_size": 100_352, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False, "num_experts_per_tok": 5, "num_experts": 7,
        "norm_topk_prob": False,
    },
    fields=(
        *DECODER,
        FULL_LAYERS,
        Heads(),
        Rope(base=5e5),
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("intermediate_size", "moe.hidden_dim"),
        Key("norm_topk_prob", "moe.renormalize_gates", bool),
        always(
            attention__query_key_norm="width", norm_placement="post", moe__router="softmax_topk",
            moe__activation="swiglu",
        ),
        *AUXILIARY,
    ),
    tensors=(*SANDWICH_STACK, *TENSORS),
)  # fmt: skip
