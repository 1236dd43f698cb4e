"""`generate`: text of a trained language model, in this process."""

import sys
from dataclasses import replace
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
            "export in the shardyard format.",
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
                "deterministic; 0 is greedy. [the model's generation_config.json, or 0]"
            ),
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(metavar="N", help="Sample from the N likeliest tokens; 0: from all. [the model's]")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="X", help="Sample from the likeliest tokens with total probability X. [the model's]"),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Sample from tokens with at least X times the likeliest one's probability. [the model's]"
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(metavar="X", help="Above 1: make tokens that the text has less likely. [the model's]"),
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
    log_probs: Annotated[
        bool, typer.Option("--log-probs", help="With --json: add every new token with its log-probability.")
    ] = False,
    url: Url = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text with a job's newest checkpoint.

    The text is printed as it is generated. Jobs of this machine need no control plane: their folders are found under
    the state folder.
    """
    from moe.spec import spec_error
    from service.cli.generation import generation_spec

    spec = generation_spec(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, num_beams=beams, length_penalty=length_penalty,
        stop=tuple(stop) if stop else None, seed=seed, chat=chat or None, log_probs=log_probs or None,
    )  # fmt: skip
    if log_probs and not as_json:
        raise spec_error("requires", "--log-probs", None, "requires --json, which prints them", "add --json")
    try:
        _generate(job, prompt, spec, url, state_dir, as_json)
    except KeyboardInterrupt:
        if not as_json:
            print(flush=True)
        raise typer.Exit(INTERRUPTED) from None


def _generate(
    job: str, prompt: str | None, spec: "GenerationSpec", url: str | None, state_dir: "Path | None", as_json: bool
) -> None:
    from service.cli.generation import option_names
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
    with option_names():
        spec, notes = model.generator.with_model_settings(spec)
        stream = model.generator.stream(text, spec)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    while True:
        try:
            piece = next(stream)
        except StopIteration as stop:
            ending: Ending = replace(stop.value, notes=notes or None)
            break
        pieces.append(piece)
        if not as_json:
            print(printable_lines(piece) if to_terminal else piece, end="", flush=True)
    if as_json:
        fields = {"prompt": text, "text": "".join(pieces), **ending.to_plain(), "checkpoint": checkpoint}
        print_json(fields)
    else:
        print(flush=True)
