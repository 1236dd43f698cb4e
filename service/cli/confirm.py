"""Asking back before something that cannot be undone."""

import sys

import typer

from service.cli.failures import CommandError, Misuse


def confirm(question: str, yes: bool) -> None:
    """Returns when a person at the terminal agrees, or `--yes` has already. Raises Misuse where nobody can be asked,
    CommandError where the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Misuse(f"{question} Nobody can be asked here: add --yes to say so beforehand")
    if not typer.confirm(question, err=True):
        raise CommandError("nothing was done")
