"""Loading of the pretrained model that training started from."""

from collections.abc import Sequence

import torch

from moe.export.hugging_face import load_hf
from moe.interchange.expand import expand_model
from moe.spec import LanguageModelSpec, ModelSpec, model_spec
from moe.tasks.language.generator import LanguageGenerator
from moe.tasks.language.pretrained import model_tokenizer


def base_folder(spec: ModelSpec, roots: Sequence[str] | None = None) -> str | None:
    """Pretrained folder of a model; None if it started from random weights.

    Raises SpecError if the folder no longer holds a readable model; its weights are not checked.
    """
    if not isinstance(spec, LanguageModelSpec) or spec.from_folder is None:
        return None
    expand_model({"from": spec.from_folder}, roots)
    return spec.from_folder


def load_base(folder: str, max_tokens: int, dtype: str, roots: Sequence[str] | None = None) -> LanguageGenerator:
    """Load the pretrained base of a trained model, computing in `dtype`, for texts of up to `max_tokens`.

    Raises SpecError.
    """
    spec = model_spec(expand_model({"from": folder}, roots))
    assert isinstance(spec, LanguageModelSpec)
    files = model_tokenizer(spec, roots).all_files()
    model = load_hf(folder, dtype=getattr(torch, dtype), roots=roots).eval()

    def read(name: str) -> bytes:
        if name not in files:
            raise FileNotFoundError(name)
        return files[name]

    return LanguageGenerator.from_files(model, max_tokens, read)
