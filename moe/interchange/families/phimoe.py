"""Phi-3.5-MoE and Phi-mini-MoE (arXiv 2404.14219, 2506.18349): Mixtral's layers with layer norms, biases, LongRoPE and
SparseMixer."""

from moe.interchange.families.decoder import ATTENTION, AUXILIARY, DECODER, FUSED, STACK, experts, router
from moe.interchange.family import Family, TensorRow, in_layers
from moe.interchange.fields import Heads, Key, Switch, always
from moe.interchange.layer_types import Windows
from moe.interchange.rope import Rope

PHIMOE = Family(
    model_types=("phimoe",),
    architecture="PhimoeForCausalLM",
    defaults={
        "vocab_size": 32_064, "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "max_position_embeddings": 131_072, "sliding_window": None, "num_local_experts": 16, "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01, "attention_bias": False, "lm_head_bias": False,
    },
    fields=(
        *DECODER,
        Heads(),
        Rope(base=1e6, scaled=("longrope",)),
        Windows(selection="all"),
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        Switch("lm_head_bias", ("output_bias",)),
        Key("num_local_experts", "moe.num_experts"),
        Key("intermediate_size", "moe.hidden_dim"),
        Key("router_jitter_noise", "moe.jitter_noise", float),
        always(norm_kind="layer", moe__router="sparsemixer", moe__activation="swiglu"),
        *AUXILIARY,
    ),
    only={"num_experts_per_tok": (2,)},
    unused_keys={"input_jitter_noise": "noise of the layer's input in training; moe.input_jitter sets the router's"},
    new_config_keys={"num_experts_per_tok": 2},
    aliases={"num_experts": "num_local_experts"},
    tensors=(
        *STACK,
        TensorRow("norm.bias", "model.norm.bias"),
        TensorRow("output.bias", "lm_head.bias"),
        *in_layers(
            TensorRow("norm.bias", "input_layernorm.bias"),
            TensorRow("feed_forward.norm.bias", "post_attention_layernorm.bias"),
        ),
        *ATTENTION,
        *router("block_sparse_moe.gate.weight"),
        *experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    fused_tensors=(*router("mlp.router.weight"), *FUSED),
)  # fmt: skip
