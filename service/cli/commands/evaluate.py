"""`evaluate`: scores a trained language model on a task file, in this process."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.options import AsJson, StateDir, Url

if TYPE_CHECKING:
    from moe.export.trained_model import TrainedModel


def evaluate(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="A job's id or folder in storage (@best appended: its best checkpoint), a checkpoint's folder, or an "
            "export in the shardyard format.",
        ),
    ],
    tasks: Annotated[
        Path, typer.Option("--tasks", metavar="FILE", help="Task file, YAML or JSON; data paths are relative to it.")
    ],
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N documents of each task.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Write the contexts as conversations, by the model's chat template.")
    ] = False,
    no_fewshot_as_multiturn: Annotated[
        bool,
        typer.Option(
            "--no-fewshot-as-multiturn",
            help="With --chat: put few-shot examples into the user's message, not in turns.",
        ),
    ] = False,
    no_base: Annotated[bool, typer.Option("--no-base", help="Skip the base model (model.from).")] = False,
    url: Url = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a language model and its base with lm-eval tasks.

    Tasks are data: task files run no code and read only their data files. Install lm-evaluation-harness with
    pip install 'shardyard[evaluate]'.
    """
    from moe.evaluation.extra import HarnessMissing, require_harness
    from moe.evaluation.task_file import read_tasks
    from moe.spec import spec_error
    from service.cli.failures import CommandError
    from service.cli.model_path import find_checkpoint, load_model, require_use
    from service.cli.view.output import console, print_json
    from service.wire.uses import EVALUATE

    try:
        require_harness()
    except HarnessMissing as error:
        raise CommandError(str(error)) from None
    if no_fewshot_as_multiturn and not chat:
        raise spec_error("requires", "--no-fewshot-as-multiturn", None, "requires --chat", "add --chat, or omit it")
    task_list = read_tasks(tasks)
    checkpoint = find_checkpoint(job, url, state_dir)
    require_use(checkpoint, EVALUATE, job)
    model = load_model(checkpoint)
    base = None if no_base else _base_of(model)

    from moe.evaluation.harness import ChatPrompts
    from moe.evaluation.harness import evaluate as run_evaluation
    from moe.evaluation.scores import compare_scores
    from moe.export.base import load_base
    from moe.tasks.language.generator import LanguageGenerator
    from service.cli.view.scores import scores_view

    generator, max_tokens, dtype = model.generator, model.max_tokens, model.dtype
    assert isinstance(generator, LanguageGenerator)
    # The base gets the same prompts, even if it has another template, or none.
    prompts = ChatPrompts(generator.chat_template(), not no_fewshot_as_multiturn) if chat else None
    scores, base_scores = run_evaluation(generator, task_list, limit, prompts), None
    if base is not None:
        del model, generator  # one model at a time
        base_scores = run_evaluation(load_base(base, max_tokens, dtype), task_list, limit, prompts)
    rows = compare_scores(scores, base_scores)
    if as_json:
        fields = {"checkpoint": checkpoint, "base": base, "chat": chat, "scores": [row.to_plain() for row in rows]}
        print_json({**fields, "contexts_cut": scores.num_cut})
    else:
        console().print(scores_view(rows, base, scores.num_cut, max_tokens))


def _base_of(model: "TrainedModel") -> str | None:
    """Folder of the model's base. Raises Misuse if it is missing."""
    from moe.export.base import base_folder
    from moe.spec import SpecError
    from service.cli.failures import Misuse

    try:
        return base_folder(model.spec)
    except SpecError as error:
        raise Misuse(f"{error}\nrestore the folder, or skip the base model with --no-base") from None
