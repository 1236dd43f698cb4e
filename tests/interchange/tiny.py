"""Tiny random models of every family, as transformers itself writes them, and a model of ours without arithmetic."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM
from transformers import logging as their_logging

from moe.interchange.config import describe_config
from moe.interchange.fitting import expected_tensors
from moe.parallel import Layout, apply, declare
from moe.plan.placement import Placement
from moe.plan.profile import OURS
from moe.spec import LanguageModelSpec
from tests.language import ling

their_logging.set_verbosity_error()
their_logging.disable_progress_bar()

# transformers' table has Mistral 4 as a part of a wrapper only.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
ling.register()

_BASE: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "intermediate_size": 40, "moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 10, "q_lora_rank": 14,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_group": 2, "topk_group": 1,
    "num_key_value_heads": 4,
}  # fmt: skip

LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 5.0, 9.0], "short_mscale": 1.2, "long_mscale": 1.4,
}  # fmt: skip

# `pad_token_id` where published configs have one: a first token (Granite), an end of text (GLM), any other.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 40, "attention_bias": True, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "qwen3": {"intermediate_size": 40, "head_dim": 8, "tie_word_embeddings": True, "use_sliding_window": True,
              "sliding_window": 16, "max_window_layers": 1},
    "mistral": {"intermediate_size": 40, "head_dim": 8, "sliding_window": 16},
    "qwen2": {"intermediate_size": 40, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 16,
              "max_window_layers": 1},
    "gemma3_text": {"intermediate_size": 40, "head_dim": 8, "query_pre_attn_scalar": 7, "sliding_window": 16,
                    "pad_token_id": 0, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                    "rope_parameters": {
                        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "gemma4_text": {"intermediate_size": 20, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                    "moe_intermediate_size": 12, "head_dim": 8, "global_head_dim": 12, "attention_k_eq_v": True,
                    "num_global_key_value_heads": 1, "sliding_window": 16, "final_logit_softcapping": 5.0,
                    "hidden_size_per_layer_input": 0, "pad_token_id": 0},
    "mimo_v2_flash": {"intermediate_size": 40, "moe_intermediate_size": 12, "n_routed_experts": 4,
                      "num_experts_per_tok": 2, "head_dim": 16, "v_head_dim": 10, "sliding_window": 16,
                      "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                      "rope_parameters": {
                          "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
                          "sliding_attention": {"rope_type": "default", "rope_theta": 1e4,
                                                "partial_rotary_factor": 0.5}}},
    "flint": {"intermediate_size": 40, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
              "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "mlp_only_layers": [0], "sliding_window": 16,
              "layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    "mellum": {"intermediate_size": 40, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2,
               "head_dim": 8, "sliding_window": 16, "mlp_layer_types": ["dense", "sparse", "sparse"],
               "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
               "rope_parameters": {
                   "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                   "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "phimoe": {"intermediate_size": 12, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True,
               "router_jitter_noise": 0.3, "rope_parameters": LONG_ROPE},
    "llama4_text": {"intermediate_size": 12, "intermediate_size_mlp": 40, "num_local_experts": 4,
                    "num_experts_per_tok": 1, "head_dim": 8, "attention_chunk_size": 16, "no_rope_layers": [1, 0, 1],
                    "moe_layers": [0, 2], "floor_scale": 16, "pad_token_id": 46},
    "mixtral": {"intermediate_size": 20, "num_local_experts": 4, "sliding_window": 16},
    "qwen2_moe": {"intermediate_size": 40, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
                  "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1], "use_sliding_window": True,
                  "sliding_window": 16},
    "qwen3_moe": {"intermediate_size": 40, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2,
                  "head_dim": 8, "decoder_sparse_step": 2, "norm_topk_prob": True, "attention_bias": True},
    "olmoe": {"intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 8.0,
              "pad_token_id": 1},
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy", "attention_bias": True},
    "deepseek_v3": {**_LATENT, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
        "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}},
    "glm4_moe_lite": {**{key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"},
                      "mlp_layer_types": ["dense", "sparse", "sparse"], "tie_word_embeddings": True},
    "sarvam_mla": {**_LATENT, "q_lora_rank": None},
    "gpt_oss": {"intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
                "sliding_window": 16, "pad_token_id": 47},
    "glm4_moe": {"intermediate_size": 40, "moe_intermediate_size": 12, "n_routed_experts": 4,
                 "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8,
                 "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5,
                 "pad_token_id": 2},
    "dots1": {"intermediate_size": 40, "moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
              "n_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": 16, "max_window_layers": 1},
    "solar_open": {"moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
                   "head_dim": 8},
    "sarvam_moe": {"intermediate_size": 40, "moe_intermediate_size": 12, "n_routed_experts": 4,
                   "num_experts_per_tok": 2, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    "hy_v3": {"intermediate_size": 40, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2,
              "head_dim": 8, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "mistral4": {**{key: value for key, value in _LATENT.items() if key not in ("n_group", "topk_group")},
                 "rope_parameters": {
                     "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
                     "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
                     "llama_4_scaling_beta": 0.1, "max_position_embeddings": 64}, "pad_token_id": 11},
    "ernie4_5_moe": {"intermediate_size": 40, "moe_intermediate_size": 12, "moe_num_experts": 4, "moe_k": 2,
                     "pad_token_id": 0},
    "hunyuan_v1_moe": {"intermediate_size": 12, "num_experts": 4, "moe_topk": 2, "head_dim": 8, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 0.0}, "pad_token_id": 0},
    "flex_olmo": {"intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 1},
    "exaone_moe": {"intermediate_size": 40, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2,
                   "head_dim": 8, "mlp_layer_types": ["dense", "sparse", "sparse"], "sliding_window": 16,
                   "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "pad_token_id": 0},
    "bailing_moe_v2": {"intermediate_size": 40, "moe_intermediate_size": 12, "n_routed_experts": 4,
                       "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "head_dim": 8,
                       "rope_parameters": {"rope_type": "default", "rope_theta": 6e5, "partial_rotary_factor": 0.5}},
    "bailing_moe": {"intermediate_size": 40, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2,
                    "num_shared_experts": 2, "first_k_dense_replace": 1, "head_dim": 8, "use_bias": False,
                    "use_qkv_bias": True, "norm_head": True},
    "minimax_m2": {"intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
                   "rotary_dim": 4},
    "granitemoe": {"intermediate_size": 12, "num_local_experts": 4, "attention_multiplier": 0.3,
                   "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0,
                   "tie_word_embeddings": True, "pad_token_id": 0},
    "granitemoeshared": {"intermediate_size": 12, "num_local_experts": 4, "shared_intermediate_size": 20,
                         "pad_token_id": 0},
    "qwen3_next": {"intermediate_size": 40, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
                   "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "num_hidden_layers": 4,
                   "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
                   "linear_value_head_dim": 5},
    "qwen3_5_moe_text": {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "num_experts": 4,
                         "num_experts_per_tok": 2, "head_dim": 8, "num_hidden_layers": 4, "linear_num_key_heads": 2,
                         "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
                         "attention_bias": True},
    "deepseek_v32": {**_LATENT, "index_topk": 6, "index_n_heads": 3, "index_head_dim": 7, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
        "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}},
    "glm_moe_dsa": {**_LATENT, "index_topk": 6, "index_n_heads": 3, "index_head_dim": 7,
                    "index_topk_freq": 2, "index_skip_topk_offset": 1, "pad_token_id": 2},
    "lfm2_moe": {"intermediate_size": 40, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2,
                 "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
    "granitemoehybrid": {"intermediate_size": 12, "num_local_experts": 4, "shared_intermediate_size": 20,
                         "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                         "position_embedding_type": "rope", "mamba_n_heads": 6, "mamba_n_groups": 2,
                         "mamba_d_state": 5, "mamba_proj_bias": True, "pad_token_id": 0},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"], "head_dim": 8,
                   "intermediate_size": 20, "moe_intermediate_size": 12, "n_routed_experts": 4,
                   "moe_shared_expert_intermediate_size": 20, "moe_latent_size": 10, "mamba_num_heads": 4,
                   "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 5},
}  # fmt: skip


def their_model(family: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """A random model of a family, no two of its values alike."""
    config = AutoConfig.for_model(family, **{**_BASE, **CONFIGS[family], **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
    return model


def folder_of(model: nn.Module, path: Path, *, original: bool = True, dtype: Any = torch.bfloat16) -> Path:
    """A model as transformers writes it: in the hub's layout, or in its layout in memory."""
    model.to(dtype).save_pretrained(path, save_original_format=original)
    return path


def spec_of(config: dict[str, Any], **overrides: Any) -> LanguageModelSpec:
    return LanguageModelSpec(**{**describe_config(config, "config.json").model_fields, **overrides})


class Blank(nn.Module):
    """A module that only holds parameters."""

    def __getitem__(self, name: str) -> "Blank":
        if name not in self._modules:
            self.add_module(name, Blank())
        return self._modules[name]  # type: ignore[return-value]


def blank(spec: LanguageModelSpec, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model's parameters and buffers by their names, full of NaN, without anything that computes."""
    model = Blank()
    for tensor in expected_tensors(spec):
        module, name = module_of(model, tensor.name)
        if tensor.is_buffer:
            module.register_buffer(name, torch.full(tensor.shape, torch.nan))
        else:
            module.register_parameter(name, nn.Parameter(torch.full(tensor.shape, torch.nan, dtype=dtype)))
    return model


def module_of(model: Blank, name: str) -> tuple[Blank, str]:
    """The module that holds a tensor, and the tensor's name within it."""
    *path, last = name.split(".")
    for part in path:
        model = model[part]
    return model, last


def sharded_model(spec: LanguageModelSpec, layout: Layout) -> nn.Module:
    """This rank's shard of a blank model, split over all axes of a layout: tensor and expert axes, and FSDP, also
    unevenly."""
    model = Blank()
    for tensor in expected_tensors(spec):
        module, name = module_of(model, tensor.name)
        if tensor.is_buffer:
            module.register_buffer(name, torch.zeros(tensor.shape))
        else:
            module.register_parameter(name, None)
    with torch.device("meta"):
        declare(model, spec.parameters())
    placements = []
    for parameter in spec.parameters():
        axes = [(OURS.axes.get(dim, ""), index) for index, dim in enumerate(parameter.dims)]
        splits = [(axis, index) for axis, index in axes if layout.degree(axis) > 1]
        fsdp = "expert_fsdp" if parameter.of_experts else "fsdp"
        splits += [(fsdp, 0)] if layout.degree(fsdp) > 1 else []
        placements.append(Placement(parameter=parameter.name, shape=parameter.shape, splits=tuple(splits)))
    blocks = {f"layers.{layer}": f"layer {layer}" for layer in range(spec.num_layers)}
    return apply(model, placements, layout, blocks)


def tensors_of(folder: Path | str) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, as the safetensors library reads it."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def config_of(folder: Path | str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text())


def same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes, shapes and bytes."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


def config_of_family(family: str, **overrides: Any) -> dict[str, Any]:
    """A tiny model's `config.json`, as transformers writes it."""
    return json.loads(AutoConfig.for_model(family, **{**_BASE, **CONFIGS[family], **overrides}).to_json_string(False))
