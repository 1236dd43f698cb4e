"""Loading folders, their refusals, and changes that damage them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe.interchange.load import load_weights
from moe.spec import SpecError
from tests.interchange import tiny


def load(folder: Path, **overrides: Any) -> torch.nn.Module:
    spec = tiny.spec_of(tiny.config_of(folder), **overrides)
    model = tiny.blank(spec)
    load_weights(str(folder), model, spec)
    return model


def refusal(folder: Path, **overrides: Any) -> SpecError:
    with pytest.raises(SpecError) as error:
        load(folder, **overrides)
    return error.value


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the folder's tensors, and write them in one file."""
    tensors = tiny.tensors_of(folder)
    change(tensors)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def reconfigure(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**tiny.config_of(folder), **changes}))
