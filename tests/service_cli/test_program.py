"""The program's name in commands that are printed for a user to type."""

import sys
from pathlib import Path

import pytest

from service.cli.options import program


def executable(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("on_path", ["none", "another", "this"])
def test_a_command_to_type_next_finds_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: str
) -> None:
    started = executable(tmp_path / "my env" / "shardyard")
    another = executable(tmp_path / "bin" / "shardyard")
    monkeypatch.setattr(sys, "argv", [str(started), "up"])
    folders = {"none": tmp_path, "another": another.parent, "this": started.parent}
    monkeypatch.setenv("PATH", str(folders[on_path]))
    assert program() == ("shardyard" if on_path == "this" else f"'{started}'")


def test_a_module_goes_by_the_programs_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [__file__, "up"])
    assert program() == "shardyard"
