"""Random configs of small models of each family, as transformers has them."""

from collections.abc import Callable
from random import Random
from typing import Any

from tests.language.families.dense import gemma3_text, gemma4_text, llama, mistral, qwen2, qwen3
from tests.language.families.latent import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    glm4_moe_lite,
    glm_moe_dsa,
    mistral4,
    sarvam_mla,
)
from tests.language.families.recurrent import granitemoehybrid, lfm2_moe, nemotron_h, qwen3_5_moe_text, qwen3_next
from tests.language.families.sigmoid import (
    bailing_moe_v2,
    dots1,
    exaone_moe,
    glm4_moe,
    hy_v3,
    llama4_text,
    mimo_v2_flash,
    minimax_m2,
    sarvam_moe,
    solar_open,
)
from tests.language.families.softmax import (
    bailing_moe,
    ernie4_5_moe,
    flex_olmo,
    flint,
    gpt_oss,
    granitemoe,
    granitemoeshared,
    hunyuan_v1_moe,
    mellum,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
)
from tests.language.families.wrapped import (
    gemma3,
    gemma4,
    glm4v_moe,
    kimi_k25,
    llama4,
    mistral3,
    qwen3_5_moe,
    qwen3_vl_moe,
)

Make = Callable[[Random], dict[str, Any]]


FAMILIES: dict[str, Make] = {
    make.__name__: make
    for make in (
        mixtral,
        qwen2_moe,
        qwen3_moe,
        olmoe,
        deepseek_v2,
        deepseek_v3,
        gpt_oss,
        glm4_moe,
        minimax_m2,
        granitemoe,
        granitemoeshared,
        qwen3_next,
        qwen3_5_moe_text,
        qwen3_5_moe,
        lfm2_moe,
        granitemoehybrid,
        qwen3_vl_moe,
        glm4v_moe,
        kimi_k25,
        mistral3,
        nemotron_h,
        llama,
        qwen3,
        mistral,
        qwen2,
        gemma3_text,
        gemma3,
        gemma4_text,
        gemma4,
        mimo_v2_flash,
        dots1,
        hy_v3,
        solar_open,
        glm4_moe_lite,
        sarvam_moe,
        sarvam_mla,
        deepseek_v32,
        glm_moe_dsa,
        mistral4,
        ernie4_5_moe,
        hunyuan_v1_moe,
        flex_olmo,
        exaone_moe,
        bailing_moe_v2,
        llama4_text,
        llama4,
        flint,
        mellum,
        phimoe,
        bailing_moe,
    )
}

WITH_ADAPTERS = {name: make for name, make in FAMILIES.items() if name not in ("bailing_moe", "bailing_moe_v2")}
"""Families whose adapters have a format in PEFT: the others have no class in transformers."""
