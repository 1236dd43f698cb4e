"""Multimodal models, whose language models are of other families."""

from random import Random
from typing import Any

from tests.language.families.dense import gemma3_text, gemma4_text, qwen3
from tests.language.families.latent import deepseek_v3, mistral4
from tests.language.families.recurrent import qwen3_5_moe_text
from tests.language.families.sigmoid import glm4_moe, llama4_text
from tests.language.families.softmax import mixtral, qwen3_moe

_PICTURE_POSITIONS = {"mrope_section": [1, 1, 1], "mrope_interleaved": True}


def _qwen_vision(text: dict[str, Any]) -> dict[str, Any]:
    return {"depth": 1, "num_heads": 2, "num_position_embeddings": 4, "out_hidden_size": text["hidden_size"]}


def _beside_vision(text: dict[str, Any], **vision: Any) -> dict[str, Any]:
    """A text model in a multimodal one, whose own config says whether embeddings are tied."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "patch_size": 2, **vision}
    return {"text_config": text, "vision_config": sizes, "tie_word_embeddings": text["tie_word_embeddings"]}


def qwen3_5_moe(random: Random) -> dict[str, Any]:
    text = qwen3_5_moe_text(random)
    text["rope_parameters"] |= _PICTURE_POSITIONS
    return {**_beside_vision(text, **_qwen_vision(text)), "model_type": "qwen3_5_moe"}


def qwen3_vl_moe(random: Random) -> dict[str, Any]:
    text = qwen3_moe(random) | {"norm_topk_prob": True, "use_sliding_window": False}
    while text["hidden_size"] == 2 * text["moe_intermediate_size"]:  # stored either way
        text["moe_intermediate_size"] += 1
    text["rope_parameters"] |= _PICTURE_POSITIONS
    text = {**text, "model_type": "qwen3_vl_moe_text", "sliding_window": None}
    vision = {**_qwen_vision(text), "deepstack_visual_indexes": [0]}
    return {**_beside_vision(text, **vision), "model_type": "qwen3_vl_moe"}


def glm4v_moe(random: Random) -> dict[str, Any]:
    text = {key: value for key, value in glm4_moe(random).items() if key != "use_qk_norm"}
    pairs = text["head_dim"] // 4
    text["rope_parameters"] |= {"mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
    vision = {"depth": 1, "num_heads": 2, "out_hidden_size": text["hidden_size"], "image_size": 8}
    return {**_beside_vision({**text, "model_type": "glm4v_moe_text"}, **vision), "model_type": "glm4v_moe"}


def kimi_k25(random: Random) -> dict[str, Any]:
    vision = {"num_hidden_layers": 1, "num_attention_heads": 2}
    return {**_beside_vision(deepseek_v3(random), **vision), "model_type": "kimi_k25"}


def mistral3(random: Random) -> dict[str, Any]:
    """A language model of any family."""
    text = random.choice([mistral4, mistral4, mixtral, qwen3])(random)
    vision = {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4,
              "image_size": 8}  # fmt: skip
    return {**_beside_vision(text, **vision), "model_type": "mistral3"}


def gemma3(random: Random) -> dict[str, Any]:
    vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
    return {**_beside_vision(gemma3_text(random), **vision), "mm_tokens_per_image": 4, "model_type": "gemma3"}


def gemma4(random: Random) -> dict[str, Any]:
    vision = {"model_type": "gemma4_vision", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
              "num_key_value_heads": 2, "pooling_kernel_size": 2, "position_embedding_size": 8}  # fmt: skip
    return {**_beside_vision(gemma4_text(random), **vision), "model_type": "gemma4"}


def llama4(random: Random) -> dict[str, Any]:
    vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "vision_output_dim": 8,
              "projector_input_dim": 8, "projector_output_dim": 8, "pixel_shuffle_ratio": 0.5}  # fmt: skip
    return {**_beside_vision(llama4_text(random), **vision), "model_type": "llama4"}
