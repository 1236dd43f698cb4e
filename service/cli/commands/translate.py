"""`translate`: translates with a trained model, in this process."""

import sys
from typing import Annotated

import typer

from service.cli.options import AsJson, StateDir, Url

BATCH_LINES = 32


def translate(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="A job's id or folder in storage (@best appended: its best checkpoint), a checkpoint's folder, or an "
            "export in the shardyard format.",
        ),
    ],
    text: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="What to translate. [lines of standard input]")
    ] = None,
    beams: Annotated[int, typer.Option(metavar="N", help="Beam search with N beams; 1 is greedy.")] = 1,
    length_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="With --beams: higher values prefer longer translations. [0.6]")
    ] = None,
    url: Url = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Translate with a job's newest checkpoint.

    Jobs of this machine need no control plane: their folders are found under the state folder.
    """
    from itertools import islice

    from service.cli.generation import generation_spec
    from service.cli.model_path import find_checkpoint, load_model, require_use
    from service.cli.view.output import print_json
    from service.wire.uses import TRANSLATE

    options = generation_spec(num_beams=beams, length_penalty=length_penalty)
    spec = None if beams == 1 else options
    checkpoint = find_checkpoint(job, url, state_dir)
    require_use(checkpoint, TRANSLATE, job)
    model = load_model(checkpoint)
    lines = iter(text) if text else (line.rstrip("\n") for line in sys.stdin)
    at_once = 1 if text is None and sys.stdin.isatty() else BATCH_LINES
    while batch := list(islice(lines, at_once)):
        for source, translation in zip(batch, model.generate(batch, spec), strict=True):
            if as_json:
                print_json({"source": source, "translation": translation, "checkpoint": checkpoint}, lines=True)
            else:
                print(translation, flush=True)
