"""The model that a trained one began with, put to use: the weights of the folder that its spec names."""

from collections.abc import Sequence

import torch

from moe.export.hugging_face import load_hf
from moe.interchange.expand import expand_model
from moe.spec import LanguageModelSpec, ModelSpec, model_spec
from moe.tasks.language.generator import LanguageGenerator
from moe.tasks.language.pretrained import model_tokenizer


def base_folder(spec: ModelSpec, roots: Sequence[str] | None = None) -> str | None:
    """The folder that a model began with; None of one that began with random weights. Raises SpecError where no model
    can be read there any more; its weights are not looked at."""
    if not isinstance(spec, LanguageModelSpec) or spec.from_folder is None:
        return None
    expand_model({"from": spec.from_folder}, roots)
    return spec.from_folder


def load_base(
    folder: str, max_tokens: int, dtype: str, roots: Sequence[str] | None = None
) -> LanguageGenerator:
    """The model of a folder that one began with which was trained on texts of `max_tokens`, and computes in `dtype`, as
    this one does. Raises SpecError."""
    spec = model_spec(expand_model({"from": folder}, roots))
    assert isinstance(spec, LanguageModelSpec)
    files = model_tokenizer(spec, roots).all_files()
    model = load_hf(folder, dtype=getattr(torch, dtype), roots=roots).eval()

    def read(name: str) -> bytes:
        if name not in files:
            raise FileNotFoundError(name)
        return files[name]

    return LanguageGenerator.from_files(model, max_tokens, read)
