"""`load_hf` and `save_hf`: models from and to folders in the Hugging Face format."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from moe.interchange.expand import expand_model
from moe.interchange.load import load_weights
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource
from moe.parallel import Layout
from moe.plan import Plan
from moe.spec import LanguageModelSpec, UpcycleSpec, model_spec, spec_error
from moe.storage.home import expand_home
from moe.tasks.build import build_model


def load_hf(
    folder: str | Path,
    plan: Plan | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    roots: Sequence[str] | None = None,
    upcycle: UpcycleSpec | None = None,
    seed: int = 0,
) -> nn.Module:
    """Load the model of a folder (a path or fsspec URL): this rank's part under a `plan`, else all of it.

    `upcycle` turns a dense model into a mixture of experts, with router weights drawn from `seed`.
    `model.hugging_face` keeps what `save_hf` needs. Raises SpecError if the folder is unsupported or damaged.
    """
    url = str(folder) if "://" in str(folder) else str(expand_home(folder).absolute())
    upcycle_fields = {} if upcycle is None else {"upcycle": upcycle.model_dump(mode="json")}
    spec = model_spec(expand_model({"from": url, **upcycle_fields}, roots))
    assert isinstance(spec, LanguageModelSpec)
    layout = Layout.single(device) if plan is None else Layout.build(plan, device)
    model = build_model(spec, layout, seed=seed, dtype=dtype)
    load_result = load_weights(url, model, spec, layout, roots=roots, seed=seed)
    model.hugging_face = LoadRecord(spec, layout, Origin.of_folder(url, spec, roots), load_result.notes)  # type: ignore[assignment]
    return model


class LoadRecord:
    """Origin of a loaded model, for `save_hf`."""

    def __init__(self, spec: LanguageModelSpec, layout: Layout, origin: Origin, notes: tuple[str, ...]) -> None:
        self.spec, self.layout, self.origin = spec, layout, origin
        self.notes = notes
        """Notes about the folder, for the user."""


def save_hf(
    model: nn.Module,
    folder: str | Path,
    *,
    spec: LanguageModelSpec | None = None,
    layout: Layout | None = None,
    dtype: torch.dtype = torch.bfloat16,
    files: Mapping[str, bytes] | None = None,
    roots: Sequence[str] | None = None,
) -> None:
    """Write a model that `load_hf` loaded, or any model with its `spec`, as `save_folder` does. Raises SpecError.

    With a `layout`, the model is one rank's part, and the call is collective.
    """
    load_record = getattr(model, "hugging_face", None)
    if spec is None and load_record is None:
        raise spec_error("missing", "spec", None, "is required for a model that was not loaded by load_hf", "pass it")
    if load_record is not None and spec is None:
        save_folder(
            load_record.spec,
            ModelSource(model, load_record.layout),
            folder,
            origin=load_record.origin,
            roots=roots,
            files=files,
        )
        return
    assert spec is not None
    save_folder(spec, ModelSource(model, layout), folder, dtype=dtype, files=files, roots=roots)
