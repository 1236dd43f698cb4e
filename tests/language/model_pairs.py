"""Models of transformers with random weights, and the same folder's model as ours."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe.interchange import load_weights
from moe.interchange.expand import expand_model
from moe.spec import LanguageModelSpec, model_spec
from moe.tasks.language import LanguageModel, build_model


class AsDouble(TorchFunctionMode):
    """Float64 where float32 is asked for by name: their routers, norms and rotary positions cast down to it even in a
    float64 model."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {key: _wide(value) for key, value in (kwargs or {}).items()}
        if func is Tensor.float:
            return args[0].double()
        return func(*map(_wide, args), **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@dataclass(frozen=True)
class ModelPair:
    """One model, in transformers (`reference`) and here (`model`)."""

    reference: nn.Module
    model: LanguageModel
    spec: LanguageModelSpec
    folder: Path


def model_pair(config: dict[str, Any], folder: Path, seed: int = 0) -> ModelPair:
    """Their model of a config with random weights, saved in float64, and ours, loaded from there with the config as it
    is: transformers would write its own spellings."""
    reference = their_model(config, seed)
    write_theirs(reference, folder)
    (folder / "config.json").write_text(json.dumps(config))
    fields = expand_model({"from": str(folder), **(moe_of(config) if has_experts(config) else {})}, None)
    spec = model_spec(fields)
    model = build_model(spec, dtype=torch.float64)
    load_weights(str(folder), model, spec)
    return ModelPair(reference, model, spec, folder)


GROUPS = {"moe": {"group_tokens": 64}}


def moe_of(config: dict[str, Any]) -> dict[str, Any]:
    """Fields beside `from`. Compared with models in evaluation, SparseMixer does not sample."""
    if config["model_type"] == "phimoe":
        return {"moe": {**GROUPS["moe"], "training_choice": "highest"}}
    return GROUPS


def has_experts(config: dict[str, Any]) -> bool:
    return bool(
        config.get("text_config", config).keys() & {"num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"}
    )


def their_model(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """A random model of transformers in float64: attention and experts in plain operations, no parameter at a special
    value."""
    torch.manual_seed(seed)
    if config["model_type"] == "mistral4":  # which transformers' table has as a part of a wrapper only
        text_classes = transformers.Mistral4Config, transformers.Mistral4ForCausalLM
        transformers.AutoModelForCausalLM.register(*text_classes, exist_ok=True)
    if config["model_type"] == "llama4":  # whose class reads an output that its own language model lacks
        transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    if config["model_type"].startswith("bailing_moe"):
        from tests.language import ling

        ling.register()
    with as_double():
        auto_config = transformers.AutoConfig.for_model(
            **config, attn_implementation="eager", experts_implementation="eager"
        )
        kind = (
            transformers.AutoModelForImageTextToText if "text_config" in config else transformers.AutoModelForCausalLM
        )
        model = kind.from_config(auto_config, attn_implementation="eager").double().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in (*model.parameters(), *_saved_buffers(model)):
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.add_(0.3 * noise if parameter.dim() < 2 else noise / parameter.shape[-1] ** 0.5)
    return model


def write_theirs(model: nn.Module, folder: Path) -> None:
    """Write a model as published. transformers 5.24 writes other names for Kimi-K2.5, and does not transpose experts of
    Qwen3-VL back."""
    kind = model.config.model_type
    model.save_pretrained(folder, save_original_format=kind != "kimi_k25")
    if kind in ("kimi_k25", "qwen3_vl_moe"):
        tensors = load_file(folder / "model.safetensors")
        if kind == "kimi_k25":
            tensors = dict(as_kimi_is_published(tensors))
        else:
            tensors |= {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".mlp.experts." in name}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def as_kimi_is_published(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of Kimi-K2.5's language model by their published names, from those in memory."""
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", "language_model.model.").replace(
            "lm_head", "language_model.lm_head"
        )
        stem, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        parts = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {"down_proj": 0}
        for expert, matrix in enumerate(tensor):
            for part, index in parts.items():
                yield f"{stem}.{expert}.{part}.weight", matrix.chunk(len(parts))[index].contiguous()


def _saved_buffers(model: nn.Module) -> Iterator[Tensor]:
    return (
        buffer
        for name, buffer in model.named_buffers()
        if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar"))
    )


@contextmanager
def as_double() -> Iterator[None]:
    """Also for operations that name no dtype, such as the division of integers."""
    torch.set_default_dtype(torch.float64)
    try:
        with AsDouble():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
