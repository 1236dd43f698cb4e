"""Models without experts and with norms before each layer: Llama (arXiv 2302.13971), Mistral (arXiv 2310.06825),
Qwen2 (arXiv 2407.10671) and Qwen3 (arXiv 2505.09388)."""

from moe.interchange.families.decoder import ATTENTION, DECODER, DENSE, FULL_LAYERS, STACK
from moe.interchange.family import Family
from moe.interchange.fields import Heads, Key, Switch, always
from moe.interchange.layer_types import Windows
from moe.interchange.rope import Rope

LLAMA = Family(
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    defaults={
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
    },
    fields=(
        *DECODER,
        Heads(),
        Rope(),
        FULL_LAYERS,
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        Key("intermediate_size", "ffn_dim"),
    ),
    only={"use_qk_norm": (False,)},
    unused_keys={"is_llama_config": "its author's note"},
    tensors=(*STACK, *ATTENTION, *DENSE),
)  # fmt: skip

MISTRAL = Family(
    model_types=("mistral",),
    architecture="MistralForCausalLM",
    defaults={
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "sliding_window": 4096,
    },
    fields=(*DECODER, Heads(), Rope(), Windows(selection="all"), Key("intermediate_size", "ffn_dim")),
    only={"attention_bias": (False,)},
    tensors=(*STACK, *ATTENTION, *DENSE),
)  # fmt: skip

QWEN2 = Family(
    model_types=("qwen2",),
    architecture="Qwen2ForCausalLM",
    defaults={
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28,
    },
    fields=(
        *DECODER,
        Heads(),
        Rope(),
        Windows(selection="types", default="from", has_switch=True),
        Key("intermediate_size", "ffn_dim"),
        always(attention__bias=True),
    ),
    only={"qkv_bias": (True,), "attention_bias": (True,), "use_qk_norm": (False,)},
    tensors=(*STACK, *ATTENTION, *DENSE),
)  # fmt: skip

QWEN3 = Family(
    model_types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    defaults={
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28,
    },
    fields=(
        *DECODER,
        Heads(head_dim=128),
        Rope(),
        Windows(selection="types", default="from", has_switch=True),
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        Key("intermediate_size", "ffn_dim"),
        always(attention__query_key_norm="head"),
    ),
    only={"qkv_bias": (False,), "use_qk_norm": (True,)},
    tensors=(*STACK, *ATTENTION, *DENSE),
)  # fmt: skip
