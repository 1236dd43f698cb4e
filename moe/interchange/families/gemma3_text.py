"""Gemma 3 (arXiv 2503.19786): norms around each layer, windows in five layers of six with a RoPE base of their own."""

from moe.interchange.families.decoder import ATTENTION, DECODER, DENSE, SANDWICH_STACK
from moe.interchange.family import Family
from moe.interchange.fields import Heads, Key, Switch, always
from moe.interchange.layer_types import Windows
from moe.interchange.local_attention import LocalAttention, QueryScalar
from moe.interchange.rope import Rope

_ATTENTION = (
    Heads(head_dim=256),
    QueryScalar(),
    Switch("attention_bias", ("attention.bias", "attention.output_bias")),
    always(attention__query_key_norm="head"),
)

GEMMA3_TEXT = Family(
    model_types=("gemma3_text",),
    architecture="Gemma3ForCausalLM",
    defaults={
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "sliding_window_pattern": 6,
    },
    fields=(
        *DECODER,
        *_ATTENTION,
        LocalAttention(
            windows=Windows(selection="types", default="pattern", unused_window=4096),
            fields=_ATTENTION,
            rope=Rope(base=1e6),
            local_rope=Rope(base=1e4),
            local_base_key="rope_local_base_freq",
        ),
        Key("intermediate_size", "ffn_dim"),
        always(
            norm_placement="sandwich", norm_one_plus=True, embedding_multiplier="sqrt_model_dim",
            ffn_activation="geglu_tanh",
        ),
    ),
    only={
        "attn_logit_softcapping": (), "final_logit_softcapping": (), "use_bidirectional_attention": (False,),
        "hidden_act": ("gelu_pytorch_tanh",),
    },
    unused_keys={"_sliding_window_pattern": "layer_types says the same"},
    tensors=(*SANDWICH_STACK, *ATTENTION, *DENSE),
    activation=("hidden_activation", "gelu_pytorch_tanh"),
)  # fmt: skip
