"""Export of a language model's checkpoint as a GGUF file, streamed without holding the whole model."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from moe.export.hub import open_checkpoint
from moe.export.model_folder import ExportError
from moe.interchange.gguf.matrix_type import GgufType
from moe.interchange.gguf.save import INSTALL, save_gguf
from moe.train.checkpoint.checkpointer import CheckpointError

SUFFIX = ".gguf"


def gguf_path(target: Path) -> Path:
    """File to write: the target if its name ends in `.gguf`, or else `model.gguf` in that folder."""
    return target if target.suffix == SUFFIX else target / f"model{SUFFIX}"


def save_checkpoint_as_gguf(
    checkpoint_folder: str,
    target: Path,
    *,
    type: GgufType | None = None,
    merge: bool = False,
    chat_template: bool = False,
    use_ema: bool = False,
    roots: Sequence[str] | None = None,
) -> Path:
    """Write the language model of a checkpoint's folder (`.../checkpoints/step-...`) as a GGUF file; return its path,
    `gguf_path(target)`.

    Without `type`, matrices of a model trained in float32 or float64 are float32, others bfloat16. The other options
    are those of `save_checkpoint_as_folder`. Raises ExportError without the package gguf, CheckpointError as
    `open_checkpoint` does and for an adapter that is not merged, SpecError as `save_gguf` does.
    """
    if find_spec("gguf") is None:
        raise ExportError(f"GGUF files are written by the package gguf, which is not installed: {INSTALL}")
    export = open_checkpoint(checkpoint_folder, merge=merge, chat_template=chat_template, use_ema=use_ema, roots=roots)
    if export.is_adapter:
        rule = "has an adapter, which GGUF holds only merged into its base"
        raise CheckpointError(f"{checkpoint_folder} {rule}: add --merge")
    if type is None:
        type = GgufType.F32 if export.spec.train.dtype in ("float32", "float64") else GgufType.BF16
    path = gguf_path(target)
    save_gguf(
        export.model, export.source, path, name=export.spec.name, type=type, origin=export.origin, files=export.files,
        max_tokens=export.spec.data.max_tokens,
    )  # fmt: skip
    return path
