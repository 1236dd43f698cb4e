"""The command `shardyard`: its subcommands, error messages and exit codes."""

import io
import json
import os
import sys
from contextlib import suppress
from itertools import takewhile
from typing import Annotated, Any

import typer

from service.cli.commands import (
    backup,
    calibrate,
    compare,
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
    migrate,
    plan,
    recover,
    sweep,
    translate,
    up,
    upload,
    watch,
    webhooks,
)
from service.cli.failures import FAILED, MISUSE, explain, shorten_usage, usage_body
from service.signals import Interruption

app = typer.Typer(
    name="shardyard",
    epilog="Exit codes: 0 success, 1 failure, 2 misuse (an invalid command, file or request).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_UsageError: Any = typer.BadParameter.__base__
"""An unknown option, a missing argument or an invalid value; typer exports only this subclass of it."""


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        print(f"shardyard {version('shardyard')}")
        raise typer.Exit


@app.callback()
def shardyard(
    shows_version: Annotated[
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
    sweep.sweep,
    compare.compare,
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
    upload.upload,
    doctor.doctor,
    recover.recover,
    migrate.migrate,
    backup.backup,
    backup.restore,
    calibrate.calibrate,
    plan.schema,
    demo.demo,
):
    app.command()(command)
app.add_typer(webhooks.app)
app.add_typer(upload.app)


def main() -> None:
    """Run one command and exit: 0 done, 1 failed, 2 misuse."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for locales that cannot encode jobs' names
    try:
        try:
            status = app(prog_name="shardyard", standalone_mode=False)
        finally:
            sys.stdout.flush()  # report write errors here, not at the interpreter's exit
    except _UsageError as error:
        shorten_usage(error)
        _print_json(usage_body(error))
        error.show()
        sys.exit(MISUSE)
    except typer.Abort:
        print("shardyard: aborted", file=sys.stderr)
        sys.exit(FAILED)
    except Interruption as interruption:
        sys.exit(interruption.exit_code)
    except BrokenPipeError:
        # The reader of standard output has closed it, as in `shardyard ls | head -1`.
        _drop_output()
        sys.exit(FAILED)
    except Exception as error:
        if (failure := explain(error)) is None:
            raise
        _print_json(failure.body)
        _drop_output()  # standard output may be the cause
        print(failure.text, file=sys.stderr)
        sys.exit(failure.exit_code)
    if isinstance(status, int):  # of typer.Exit
        sys.exit(status)


def _print_json(body: dict[str, Any]) -> None:
    """Print a failure for programs, if the command line has `--json`."""
    if "--json" in takewhile(lambda word: word != "--", sys.argv):
        with suppress(OSError):  # one line: some commands print JSON lines before
            print(json.dumps(body), flush=True)


def _drop_output() -> None:
    """Redirect standard output to /dev/null, so that the final flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
