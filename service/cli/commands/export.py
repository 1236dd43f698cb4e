"""`export`: a trained model in other tools' formats, in this process."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moe.interchange.gguf.matrix_type import GgufType
from service.cli.options import AsJson, StateDir, Url


class Format(StrEnum):
    """Tensor names and accompanying files of an export."""

    SHARDYARD = "shardyard"
    HUGGINGFACE = "huggingface"
    GGUF = "gguf"


def export(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="A job's id or folder in storage (@best appended: its best checkpoint), or a checkpoint's folder.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to create, or FILE.gguf.")],
    format: Annotated[
        Format,
        typer.Option(
            help=(
                "shardyard: this project's names and config. huggingface: as transformers and vLLM load it. gguf: one "
                "file, for llama.cpp."
            )
        ),
    ] = Format.SHARDYARD,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Hugging Face format and GGUF, model with adapters: export merged weights. Without it, the "
            "adapters alone, in PEFT's format; GGUF requires it.",
        ),
    ] = False,
    chat_template: Annotated[
        bool,
        typer.Option(
            "--chat-template",
            help="Hugging Face format and GGUF: use data.chat_template of the job instead of the base model's "
            "template.",
        ),
    ] = False,
    ema: Annotated[
        bool, typer.Option("--ema", help="Export the average of the weights that train.ema_decay keeps.")
    ] = False,
    outtype: Annotated[
        GgufType | None,
        typer.Option(help="GGUF: type of matrices. Default: f32 for a model trained in float32, else bf16."),
    ] = None,
    url: Url = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Export a job's newest checkpoint as safetensors and JSON, or as GGUF.

    Weights are complete, whatever the number of workers that saved them. The shardyard format loads them into memory;
    the Hugging Face format and GGUF, for language models, do so in parts.
    """
    from service.cli.failures import CommandError, Misuse
    from service.cli.model_path import find_checkpoint
    from service.cli.view.amounts import num_bytes
    from service.cli.view.output import print_json
    from service.signals import interruptions

    if merge and format is Format.SHARDYARD:
        raise Misuse(
            "--merge requires --format huggingface or gguf: the shardyard format keeps weights and adapters apart"
        )
    if chat_template and format is Format.SHARDYARD:
        raise Misuse(
            "--chat-template requires --format huggingface or gguf: the shardyard format always has the job's template"
        )
    if outtype is not None and format is not Format.GGUF:
        raise Misuse("--outtype requires --format gguf: the other formats keep the dtypes of the model")
    checkpoint = find_checkpoint(job, url, state_dir)
    from moe.export.gguf_file import save_checkpoint_as_gguf
    from moe.export.hub import save_checkpoint_as_folder
    from moe.export.model_folder import ExportError, save_exported  # torch: seconds
    from moe.export.trained_model import TrainedModel
    from moe.storage.home import expand_home
    from moe.train.checkpoint.checkpointer import CheckpointError

    target = expand_home(folder).absolute()
    try:
        with interruptions():  # whichever comes, no draft is left behind
            if format is Format.HUGGINGFACE:
                save_checkpoint_as_folder(checkpoint, target, merge=merge, chat_template=chat_template, use_ema=ema)
            elif format is Format.GGUF:
                target = save_checkpoint_as_gguf(
                    checkpoint, target, type=outtype, merge=merge, chat_template=chat_template, use_ema=ema
                )
            else:
                save_exported(TrainedModel.load(checkpoint, use_ema=ema), target)
    except ExportError as error:
        raise Misuse(str(error)) from None
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    paths = [target] if target.is_file() else sorted(path for path in target.iterdir() if path.is_file())
    target = target.parent if target.is_file() else target
    files = {path.name: path.stat().st_size for path in paths}
    if as_json:
        print_json({"folder": str(target), "files": files, "checkpoint": checkpoint})
        return
    print(f"{target}: {', '.join(f'{name} ({num_bytes(size)})' for name, size in files.items())}")
