"""The conversion of every family once more, slow and plain: from a model as transformers has it in memory to our
parameters, element by element where it is not obvious."""

import torch
from torch import Tensor, nn


def ours_of(model: nn.Module) -> dict[str, Tensor]:
    """Our parameters and buffers of one of theirs, by our names."""
    base, config = model.model, model.config
    found = {"embedding.weight": base.embed_tokens.weight, "norm.weight": base.norm.weight}
    if not config.tie_word_embeddings:
        found["output.weight"] = model.lm_head.weight
    for number, layer in enumerate(base.layers):
        at = f"layers.{number}."
        found[f"{at}norm.weight"] = layer.input_layernorm.weight
        found[f"{at}feed_forward.norm.weight"] = layer.post_attention_layernorm.weight
        mixer = getattr(layer, "linear_attn", None)
        attention = _attention(layer.self_attn) if mixer is None else _linear(mixer)
        found |= {f"{at}attention.{name}": each for name, each in attention.items()}
        block = layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp
        if hasattr(block, "experts"):
            shared = getattr(layer, "shared_mlp", None)
            found |= {f"{at}feed_forward.moe.{name}": each for name, each in _experts(block, shared).items()}
        else:
            for name, theirs in (("w_gate", "gate_proj"), ("w_in", "up_proj"), ("w_out", "down_proj")):
                found[f"{at}feed_forward.dense.{name}.weight"] = getattr(block, theirs).weight
    return {name: each.detach() for name, each in found.items()}


def _attention(attention: nn.Module) -> dict[str, Tensor]:
    names = {
        "query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "query_norm": "q_norm",
        "key_norm": "k_norm", "query_down": "q_a_proj", "query_up": "q_b_proj",
        "key_value_down": "kv_a_proj_with_mqa", "key_value_up": "kv_b_proj", "key_value_norm": "kv_a_layernorm",
    }  # fmt: skip
    if hasattr(attention, "q_a_layernorm"):
        names["query_norm"] = "q_a_layernorm"
    found = {}
    for name, theirs in names.items():
        module = getattr(attention, theirs, None)
        for kind in ("weight", "bias"):
            if module is not None and getattr(module, kind, None) is not None:
                found[f"{name}.{kind}"] = getattr(module, kind)
    if hasattr(attention, "sinks"):
        found["sinks"] = attention.sinks
    return found


def _linear(mixer: nn.Module) -> dict[str, Tensor]:
    heads, keys, values = mixer.num_k_heads, mixer.head_k_dim, mixer.head_v_dim
    each = mixer.num_v_heads // heads
    flat, rows = mixer.conv1d.weight[:, 0], []
    for head in range(heads):
        rows += [flat[head * keys + channel] for channel in range(keys)]
        rows += [flat[heads * keys + head * keys + channel] for channel in range(keys)]
        for value in range(head * each, (head + 1) * each):
            rows += [flat[2 * heads * keys + value * values + channel] for channel in range(values)]
    return {
        "projection.weight": mixer.in_proj_qkvz.weight, "decays.weight": mixer.in_proj_ba.weight,
        "convolution.weight": torch.stack(rows), "decay": mixer.A_log, "time_step": mixer.dt_bias,
        "value_norm.weight": mixer.norm.weight, "output.weight": mixer.out_proj.weight,
    }  # fmt: skip


def _experts(block: nn.Module, shared_mlp: nn.Module | None) -> dict[str, Tensor]:
    router = block.gate if hasattr(block, "gate") else block.router
    experts, found = block.experts, {"router": router.weight.T}
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if hasattr(experts, "gate_up_proj_bias"):  # GPT-OSS: in by out, even columns the gate's
        width = down.shape[1]
        found["logit_bias"] = router.bias
        for name, first in (("gate", 0), ("in", 1)):
            columns = [2 * column + first for column in range(width)]
            found[f"experts.w_{name}"] = gate_up[:, :, columns]
            found[f"experts.b_{name}"] = experts.gate_up_proj_bias[:, columns]
        found["experts.w_out"], found["experts.b_out"] = down, experts.down_proj_bias
    else:
        gates, ups = gate_up.chunk(2, dim=1)
        for name, each in (("w_gate", gates), ("w_in", ups), ("w_out", down)):
            found[f"experts.{name}"] = torch.stack([expert.T for expert in each])
    for owner in (block, router):
        if hasattr(owner, "e_score_correction_bias"):
            found["router_bias"] = owner.e_score_correction_bias
    shared = getattr(block, "shared_expert", getattr(block, "shared_experts", None))
    if shared is not None:
        for name, theirs in (("w_gate", "gate_proj"), ("w_in", "up_proj"), ("w_out", "down_proj")):
            found[f"shared.{name}"] = getattr(shared, theirs).weight.T
    if hasattr(block, "shared_expert_gate"):
        found["shared.gate"] = block.shared_expert_gate.weight.T
    if shared_mlp is not None:
        gate, up = shared_mlp.input_linear.weight.chunk(2)
        found |= {"shared.w_gate": gate.T, "shared.w_in": up.T, "shared.w_out": shared_mlp.output_linear.weight.T}
    return found
