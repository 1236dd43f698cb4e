"""Text model of Qwen3-VL mixtures: Qwen3-MoE with all experts of a layer in one tensor."""

from dataclasses import replace

from moe.interchange.families.decoder import ATTENTION, AUXILIARY, DECODER, DENSE, STACK, router
from moe.interchange.families.qwen3_moe import QWEN3_MOE
from moe.interchange.family import TensorRow, in_layers
from moe.interchange.fields import Heads, Key, SparseSteps, Switch, always
from moe.interchange.rope import Rope

QWEN3_VL_MOE_TEXT = replace(
    QWEN3_MOE,
    model_types=("qwen3_vl_moe_text",),
    architecture="Qwen3VLMoeTextModel",
    defaults={
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "max_position_embeddings": 128_000, "attention_bias": False, "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60,
    },
    fields=(
        *DECODER,
        Heads(),
        Rope(base=5e5, has_picture_positions=True),
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        SparseSteps(),
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        always(
            attention__query_key_norm="head", moe__router="softmax_topk", moe__activation="swiglu",
            moe__renormalize_gates=True,
        ),
        *AUXILIARY,
    ),
    only={"norm_topk_prob": (True,), "use_sliding_window": (False,), "sliding_window": ()},
    unused_keys={},
    tensors=(
        *STACK,
        *ATTENTION,
        *DENSE,
        *router("mlp.gate.weight"),
        *in_layers(
            # Inputs by outputs, unlike in memory.
            TensorRow("feed_forward.moe.experts.w_gate", "mlp.experts.gate_up_proj", "e m h", "e m (0/2 h)"),
            TensorRow("feed_forward.moe.experts.w_in", "mlp.experts.gate_up_proj", "e m h", "e m (1/2 h)"),
            TensorRow("feed_forward.moe.experts.w_out", "mlp.experts.down_proj", "e h m", "e h m"),
        ),
    ),
)  # fmt: skip
