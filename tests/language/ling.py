"""Ling 2.0 (`bailing_moe_v2`), which transformers lacks, as its GLM-4.5: by the published code, the same function of
packed projections under other names, as transformers has it for Sarvam."""

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeForCausalLM, SarvamMoEConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

MODEL_TYPE = "bailing_moe_v2"


@strict(accept_kwargs=True)
class Ling2Config(SarvamMoEConfig):
    model_type = MODEL_TYPE
    default_theta = 600_000.0
    vocab_size: int = 157_184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    max_position_embeddings: int = 32_768
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    moe_intermediate_size: int = 512
    routed_scaling_factor: float = 1.0


class Ling2ForCausalLM(Glm4MoeForCausalLM):
    config: Ling2Config


def register() -> None:
    """Make transformers' tables know Ling 2.0."""
    AutoConfig.register(MODEL_TYPE, Ling2Config, exist_ok=True)
    AutoModelForCausalLM.register(Ling2Config, Ling2ForCausalLM, exist_ok=True)
    mapping = get_checkpoint_conversion_mapping("sarvam_moe")
    assert mapping is not None
    register_checkpoint_conversion_mapping(MODEL_TYPE, mapping, overwrite=True)
