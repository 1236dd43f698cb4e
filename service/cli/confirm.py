"""Confirmation of irreversible actions."""

import sys

import typer

from service.cli.failures import CommandError, Misuse


def confirm(question: str, yes: bool) -> None:
    """Ask for confirmation unless `yes`. Raises Misuse without a terminal, CommandError for a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Misuse(f"{question} No terminal to ask on: add --yes to confirm")
    if not typer.confirm(question, err=True):
        raise CommandError("nothing was done")
