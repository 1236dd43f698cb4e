"""The command `shardyard`: its subcommands, and how what goes wrong becomes words and an exit code."""

import io
import json
import os
import sys
from contextlib import suppress
from itertools import takewhile
from typing import Annotated

import typer

from service.cli.commands import (
    calibrate,
    control,
    delete,
    demo,
    doctor,
    download,
    evaluate,
    export,
    generate,
    jobs,
    metrics,
    plan,
    recover,
    translate,
    up,
    watch,
)
from service.cli.failures import FAILED, explain
from service.signals import Interruption

app = typer.Typer(
    name="shardyard",
    epilog="Exit codes: 0 done, 1 failed, 2 misuse (what was asked cannot be done as it was asked).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        print(f"shardyard {version('shardyard')}")
        raise typer.Exit


@app.callback()
def shardyard(
    asked: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train mixture-of-experts models on any Ray cluster from one POST."""


for command in (
    up.up,
    up.down,
    jobs.submit,
    jobs.ls,
    jobs.show,
    watch.watch,
    jobs.logs,
    metrics.metrics,
    control.cancel,
    control.pause,
    control.resume,
    control.move,
    delete.delete,
    plan.plan,
    jobs.checkpoints,
    translate.translate,
    generate.generate,
    evaluate.evaluate,
    export.export,
    download.download,
    doctor.doctor,
    recover.recover,
    calibrate.calibrate,
    plan.schema,
    demo.demo,
):
    app.command()(command)


def main() -> None:
    """Runs one command and exits: 0 done, 1 failed, 2 misuse."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for locales that cannot print the names of jobs
    try:
        try:
            app(prog_name="shardyard")
        finally:
            sys.stdout.flush()  # so that a write error is reported here, and not when the interpreter ends
    except Interruption as interruption:
        sys.exit(interruption.exit_code)
    except BrokenPipeError:
        # The reader of standard output has closed it, as in `shardyard ls | head -1`.
        _drop_output()
        sys.exit(FAILED)
    except Exception as error:
        if (failure := explain(error)) is None:
            raise
        if "--json" in takewhile(lambda word: word != "--", sys.argv):
            with suppress(OSError):  # one line, since some commands have printed lines of JSON by then
                print(json.dumps(failure.body), flush=True)
        _drop_output()  # standard output may be what cannot be written
        print(failure.text, file=sys.stderr)
        sys.exit(failure.exit_code)


def _drop_output() -> None:
    """Keeps the interpreter from another try to write what is left, and a traceback of that."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
