"""Text model of GLM-4.5V: GLM-4.5 without norms of queries and keys."""

from dataclasses import replace

from moe.interchange.families.decoder import DECODER, FULL_LAYERS
from moe.interchange.families.deepseek_v3 import EXPERT_FIELDS
from moe.interchange.families.glm4_moe import GLM4_MOE
from moe.interchange.fields import FirstDense, Heads, Switch
from moe.interchange.rope import Rope

GLM4V_MOE_TEXT = replace(
    GLM4_MOE,
    model_types=("glm4v_moe_text",),
    architecture="Glm4vMoeTextModel",
    defaults={
        **{key: value for key, value in GLM4_MOE.defaults.items() if key != "use_qk_norm"},
        "vocab_size": 151_424, "max_position_embeddings": 65_536, "attention_bias": True,
    },
    fields=(
        *DECODER,
        FULL_LAYERS,
        Heads(),
        Rope(fraction=0.5, has_picture_positions=True),
        Switch("attention_bias", ("attention.bias",)),  # the output projection has none
        FirstDense(),
        *EXPERT_FIELDS,
    ),
    only={"use_qk_norm": (False,)},
)  # fmt: skip
