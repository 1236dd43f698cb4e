"""A base model of transformers with a random adapter: ours, PEFT's, and the folders of both."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe.interchange import load_weights
from moe.interchange.adapters import save_adapter
from moe.interchange.expand import expand_model
from moe.interchange.origin import Origin
from moe.interchange.sources import ModelSource
from moe.spec import LanguageModelSpec, model_spec
from moe.tasks.language import LanguageModel, build_model
from tests.language.model_pairs import has_experts, moe_of, their_model, write_theirs


@dataclass(frozen=True)
class AdapterPair:
    """One adapter on one model, in PEFT (`reference`) and here (`model`); B is not zero."""

    reference: nn.Module
    model: LanguageModel
    spec: LanguageModelSpec
    origin: Origin
    folder: Path


def write_base(config: dict[str, Any], folder: Path, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """Write a random base model of transformers; return it and our fields of the model."""
    base = their_model(config, seed)
    write_theirs(base, folder / "base")
    of_experts = moe_of(config) if has_experts(config) else {}
    return base, expand_model({"from": str(folder / "base"), **of_experts}, None)


def write_adapter(spec: LanguageModelSpec, folder: Path, model: nn.Module, **options: Any) -> Origin:
    origin = Origin.of_folder(str(folder / "base"), spec)
    save_adapter(spec, ModelSource(model), folder / "adapter", origin=origin, **options)
    return origin


def adapter_pair(base: nn.Module, fields: dict[str, Any], folder: Path, seed: int) -> AdapterPair:
    """Load the base, put a random adapter on it, and load both in PEFT, in float64."""
    import peft  # takes seconds, in each process that collects this file

    spec = model_spec(fields)
    model = build_model(spec, seed=seed, dtype=torch.float64)
    load_weights(str(folder / "base"), model, spec)
    with_random_b(model)
    origin = write_adapter(spec, folder, model, dtype=torch.float64)
    reference = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).double()
    return AdapterPair(reference, model, spec, origin, folder)


def with_random_b(model: LanguageModel) -> LanguageModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_lora_b"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model
