"""Model families, one file each."""

from moe.interchange.families.bailing_moe import BAILING_MOE
from moe.interchange.families.bailing_moe_v2 import BAILING_MOE_V2
from moe.interchange.families.deepseek_v2 import DEEPSEEK_V2
from moe.interchange.families.deepseek_v3 import DEEPSEEK_V3
from moe.interchange.families.deepseek_v32 import DEEPSEEK_V32
from moe.interchange.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from moe.interchange.families.dots1 import DOTS1
from moe.interchange.families.ernie4_5_moe import ERNIE4_5_MOE
from moe.interchange.families.exaone_moe import EXAONE_MOE
from moe.interchange.families.flex_olmo import FLEX_OLMO
from moe.interchange.families.flint import FLINT
from moe.interchange.families.gemma3_text import GEMMA3_TEXT
from moe.interchange.families.gemma4_text import GEMMA4_TEXT
from moe.interchange.families.glm4_moe import GLM4_MOE
from moe.interchange.families.glm4_moe_lite import GLM4_MOE_LITE
from moe.interchange.families.glm_moe_dsa import GLM_MOE_DSA
from moe.interchange.families.gpt_oss import GPT_OSS
from moe.interchange.families.granitemoe import GRANITE_MOE, GRANITE_MOE_SHARED
from moe.interchange.families.granitemoehybrid import GRANITE_MOE_HYBRID
from moe.interchange.families.hunyuan_v1_moe import HUNYUAN_V1_MOE
from moe.interchange.families.hy_v3 import HY_V3
from moe.interchange.families.lfm2_moe import LFM2_MOE
from moe.interchange.families.llama4 import LLAMA4_TEXT
from moe.interchange.families.mellum import MELLUM
from moe.interchange.families.mimo_v2_flash import MIMO_V2_FLASH
from moe.interchange.families.minimax_m2 import MINIMAX_M2
from moe.interchange.families.mistral4 import MISTRAL4
from moe.interchange.families.mixtral import MIXTRAL
from moe.interchange.families.nemotron_h import NEMOTRON_H
from moe.interchange.families.olmoe import OLMOE
from moe.interchange.families.phimoe import PHIMOE
from moe.interchange.families.qwen2_moe import QWEN2_MOE
from moe.interchange.families.qwen3_5_moe import QWEN3_5_MOE_TEXT
from moe.interchange.families.qwen3_moe import QWEN3_MOE
from moe.interchange.families.qwen3_next import QWEN3_NEXT
from moe.interchange.families.sarvam_mla import SARVAM_MLA
from moe.interchange.families.sarvam_moe import SARVAM_MOE
from moe.interchange.families.solar_open import SOLAR_OPEN
from moe.interchange.families.wrappers import wrapped_families

FAMILIES = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA3_TEXT,
    GEMMA4_TEXT,
    MIXTRAL,
    QWEN3_MOE,
    OLMOE,
    QWEN2_MOE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    GPT_OSS,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE,
    MINIMAX_M2,
    MIMO_V2_FLASH,
    QWEN3_NEXT,
    QWEN3_5_MOE_TEXT,
    LFM2_MOE,
    GRANITE_MOE_HYBRID,
    NEMOTRON_H,
    DOTS1,
    HY_V3,
    SOLAR_OPEN,
    GLM4_MOE_LITE,
    SARVAM_MOE,
    SARVAM_MLA,
    DEEPSEEK_V32,
    GLM_MOE_DSA,
    MISTRAL4,
    ERNIE4_5_MOE,
    HUNYUAN_V1_MOE,
    FLEX_OLMO,
    EXAONE_MOE,
    BAILING_MOE_V2,
    LLAMA4_TEXT,
    FLINT,
    MELLUM,
    PHIMOE,
    BAILING_MOE,
)
"""In order of preference: a model is written in the first family that can represent it."""

BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}

BY_ARCHITECTURE = {("bailing_moe", BAILING_MOE_V2.architecture): BAILING_MOE_V2}
"""Families that share the `model_type` of another one, by it and the one of their `architectures`."""

WRAPPED_FAMILIES = wrapped_families(BY_TYPE)
"""Families of multimodal models, by their `model_type` and that of their language model."""

__all__ = ["BY_ARCHITECTURE", "BY_TYPE", "FAMILIES", "WRAPPED_FAMILIES"]
