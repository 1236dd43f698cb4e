"""`generate`: text of a trained language model, in this process."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.options import AsJson, StateDir, Url

if TYPE_CHECKING:
    from pathlib import Path

    from moe.records import Ending
    from moe.spec.generation import GenerationSpec

INTERRUPTED = 130
"""Exit code of a program ended by Ctrl-C."""


def generate(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="A job's id or folder in storage (@best appended: its best checkpoint), a checkpoint's folder, or an "
            "export.",
        ),
    ],
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text to continue. [standard input, unchanged]")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Maximum number of new tokens. [256]")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help=(
                "Sampling temperature: 1 samples from the model's distribution; lower is more "
                "deterministic. [0: greedy]"
            ),
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(metavar="N", help="Sample from the N likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="X", help="Sample from the likeliest tokens with total probability X.")
    ] = None,
    beams: Annotated[
        int | None, typer.Option(metavar="N", help="Beam search with N beams; prints only the final text.")
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="With --beams: higher values prefer longer texts. [0.6]")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before TEXT; repeat for several.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat PROMPT as a user's message in the model's chat template.")
    ] = False,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Random seed of sampling. [0]")] = None,
    url: Url = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text with a job's newest checkpoint.

    The text is printed as it is generated. Jobs of this machine need no control plane: their folders are found under
    the state folder.
    """
    from service.cli.generation import generation_spec

    spec = generation_spec(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, num_beams=beams,
        length_penalty=length_penalty, stop=tuple(stop) if stop else None, seed=seed,
        chat=chat or None,
    )  # fmt: skip
    try:
        _generate(job, prompt, spec, url, state_dir, as_json)
    except KeyboardInterrupt:
        if not as_json:
            print(flush=True)
        raise typer.Exit(INTERRUPTED) from None


def _generate(
    job: str, prompt: str | None, spec: "GenerationSpec", url: str | None, state_dir: "Path | None", as_json: bool
) -> None:
    from service.cli.model_path import find_checkpoint, load_model, require_use
    from service.cli.view.output import print_json
    from service.cli.view.printable import printable_lines
    from service.wire.uses import GENERATE

    checkpoint = find_checkpoint(job, url, state_dir)
    require_use(checkpoint, GENERATE, job)
    prompt_bytes = sys.stdin.buffer.read() if prompt is None else prompt.encode("utf-8", "surrogateescape")
    text = prompt_bytes.decode("utf-8", "replace")
    model = load_model(checkpoint)
    model.generator.prepare_for_decoding()
    to_terminal, pieces = sys.stdout.isatty(), list[str]()
    stream = model.generator.stream(text, spec)
    while True:
        try:
            piece = next(stream)
        except StopIteration as stop:
            ending: Ending = stop.value
            break
        pieces.append(piece)
        if not as_json:
            print(printable_lines(piece) if to_terminal else piece, end="", flush=True)
    if as_json:
        fields = {"prompt": text, "text": "".join(pieces), **ending.to_plain(), "checkpoint": checkpoint}
        print_json(fields)
    else:
        print(flush=True)
