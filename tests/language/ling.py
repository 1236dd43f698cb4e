"""Ling, which transformers lacks. Version 2.0 (`bailing_moe_v2`) as its GLM-4.5: by the published code, the same
function of packed projections under other names, as transformers has it for Sarvam. Version 1 (`bailing_moe`) with the
attention of GLM-4.5, and with experts and logits in plain operations, by the code published with it."""

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeForCausalLM, PreTrainedConfig, SarvamMoEConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMLP


@strict(accept_kwargs=True)
class Ling2Config(SarvamMoEConfig):
    model_type = "bailing_moe_v2"
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


@strict(accept_kwargs=True)
class BailingMoeConfig(PreTrainedConfig):
    """Keys and defaults as published; attributes that are no keys are those that GLM-4.5 reads."""

    model_type = "bailing_moe"
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts", "attention_bias": "use_qkv_bias"}
    use_qk_norm, n_group, topk_group, routed_scaling_factor, n_shared_experts = False, 1, 1, 1.0, 1
    vocab_size: int = 30_592
    hidden_size: int = 1024
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 0
    hidden_act: str = "silu"
    use_qkv_bias: bool = False
    use_bias: bool = True
    rms_norm_eps: float = 1e-5
    norm_head: bool = False
    tie_word_embeddings: bool = False
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1
    output_dropout: float = 0.1
    initializer_range: float = 0.02
    max_position_embeddings: int = 16_384
    rope_parameters: RopeParameters | dict | None = None
    use_cache: bool = True
    use_sliding_window: bool = False
    sliding_window: int = 4096
    max_window_layers: int = 28
    pad_token_id: int | None = 126_081
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    num_experts: int = 16
    num_shared_experts: int = 0
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    moe_intermediate_size: int | None = None
    first_k_dense_replace: int = 0
    head_dim: int | None = None
    output_router_logits: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


class Ling1Experts(nn.Module):
    def __init__(self, config: BailingMoeConfig) -> None:
        super().__init__()
        num_experts, width, hidden = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.zeros(num_experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.zeros(num_experts, width, hidden))


class Ling1Mixture(nn.Module):
    """Every expert computes every token; a token's gates are zero for the experts that it does not choose."""

    def __init__(self, config: BailingMoeConfig) -> None:
        super().__init__()
        self.top_k, self.renormalizes = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Ling1Experts(config)
        shared_size = config.num_shared_experts * config.moe_intermediate_size
        self.shared_experts = Glm4MoeMLP(config, intermediate_size=shared_size)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        gates, chosen = scores.topk(self.top_k, dim=-1)
        if self.top_k > 1 and self.renormalizes:
            gates = gates / gates.sum(-1, keepdim=True)
        gates_BLE = torch.zeros_like(scores).scatter(-1, chosen, gates)
        y = self.shared_experts(x)
        for expert, (gate_up, down) in enumerate(zip(self.experts.gate_up_proj, self.experts.down_proj, strict=True)):
            gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
            y = y + gates_BLE[..., expert, None] * functional.linear(functional.silu(gate) * up, down)
        return y


class NormalizedHead(nn.Linear):
    """Logits by a matrix whose columns are divided by their norms, as in the published code's training."""

    def forward(self, x: Tensor) -> Tensor:
        norms = self.weight.norm(p=2, dim=0, keepdim=True) + 1e-7
        return functional.linear(x, self.weight / norms.detach())


class BailingMoeForCausalLM(Glm4MoeForCausalLM):
    config: BailingMoeConfig

    def __init__(self, config: BailingMoeConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers[config.first_k_dense_replace :]:
            layer.mlp = Ling1Mixture(config)
        if config.norm_head:
            self.lm_head = NormalizedHead(config.hidden_size, config.vocab_size, bias=False)


def register() -> None:
    """Make transformers' tables know both versions of Ling."""
    classes: dict[Any, Any] = {BailingMoeConfig: BailingMoeForCausalLM, Ling2Config: Ling2ForCausalLM}
    mapping = get_checkpoint_conversion_mapping("sarvam_moe")
    assert mapping is not None
    for config_class, model_class in classes.items():
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
        register_checkpoint_conversion_mapping(config_class.model_type, mapping, overwrite=True)
