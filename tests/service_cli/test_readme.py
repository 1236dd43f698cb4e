"""All that the documents tell people to type exists: commands, options, settings, Services, Secrets, fields."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields as fields_of
from importlib.util import find_spec
from typing import Any, get_args

import pytest
import typer.main
import yaml

from service.cli.main import app
from service.client.settings import ClientSettings
from service.settings import Settings
from service.wire.events import EventKind
from tests.service.control_plane import ControlPlane
from tests.service_cli.command import ROOT

DOCUMENTS = ("docs/kubernetes.md", "docs/design/deployment.md")
EXAMPLE = "examples/recommender/README.md"
ALL_FILES = [
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "examples/*.yaml")
    for path in sorted(ROOT.glob(pattern))
    if path.name != "CHANGELOG.md"  # which describes earlier states
]
"""Files that may tell somebody to type a command."""
CLI: Any = typer.main.get_command(app)


def _text(document: str) -> str:
    return (ROOT / document).read_text()


def _lines(document: str) -> list[str]:
    """The lines of all blocks of shell commands, indented ones and those in comments too."""
    text = _text(document)
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented_lines = re.findall(r"^(?: {4}|#   )(\S.*)$", text, re.MULTILINE)
    return [*(line for block in blocks for line in block.splitlines()), *indented_lines]


def _commands(document: str) -> Iterator[list[str]]:
    """The arguments of each `shardyard` in a block or, with arguments, between backticks."""
    for line in _lines(document):
        if re.match(r"(\S*/)?shardyard ", line):
            yield shlex.split(line, comments=True)[1:]
    for inline in re.findall(r"`shardyard ([^`]+)`", _text(document)):
        yield shlex.split(inline)


def _manifests() -> Iterator[Any]:
    """Objects, and patches of objects, of a control plane with a standing cluster."""
    for folder in ("base", "components/standing-cluster"):
        for path in (ROOT / "k8s" / folder).glob("*.yaml"):
            yield from yaml.safe_load_all(path.read_text())


def _services() -> set[str]:
    objects = [manifest for manifest in _manifests() if isinstance(manifest, dict)]
    return {manifest["metadata"]["name"] for manifest in objects if manifest.get("kind") == "Service"}


def _secrets_asked_for() -> set[str]:
    """Names of the Secrets that these objects use and do not create."""
    text = str(list(_manifests()))
    return set(re.findall(r"'(?:secretName|secretKeyRef)': (?:{'name': )?'([^']+)'", text))


def _check(name: str, used_options: set[str], words: Sequence[str] = ()) -> None:
    """Fail if there is no such command, or if it has no such options. `words` after the name begin with a subcommand,
    if it has any."""
    assert name in CLI.commands, f"shardyard {name}"
    command = CLI.commands[name]
    if words and hasattr(command, "commands"):
        assert words[0] in command.commands, f"shardyard {name} {words[0]}"
        command = command.commands[words[0]]
    options = {option for parameter in command.params for option in parameter.opts}
    assert used_options <= {*options, "--help"}, f"shardyard {name}: {used_options - options}"


def test_commands_and_their_options_exist() -> None:
    commands = {document: list(_commands(document)) for document in ALL_FILES}
    for document in ("README.md", *DOCUMENTS, EXAMPLE, "docs/sharding.md", "docs/cli.md", "examples/fine-tune.yaml"):
        assert commands[document], document
    for name, *arguments in (command for document_commands in commands.values() for command in document_commands):
        if name == "--version" or name.isupper():  # of any command
            continue
        used_options = {argument.partition("=")[0] for argument in arguments if argument.startswith("-")}
        _check(name, used_options, [argument for argument in arguments if not argument.startswith("-")])


def test_the_table_of_commands_has_all_and_their_options() -> None:
    documented_names = set()
    for row in re.findall(r"^\| (`.*)$", _text("docs/cli.md"), re.MULTILINE):
        first, *_ = re.split(r"(?<!\\)\|", row)
        words = [code.split() for code in re.findall(r"`([^`]+)`", first)]
        names = {command[0] for command in words}
        documented_names |= names
        options = set(re.findall(r"(?<!\S)`?\[?(--[\w-]+)", row))
        for name in names if len(names) == 1 else ():
            _check(name, options)
    visible_names = {name for name, command in CLI.commands.items() if not command.hidden}
    assert documented_names == visible_names, "docs/cli.md needs a row for each command"


@pytest.mark.parametrize("document", ALL_FILES)
def test_files_and_modules_of_commands_exist(document: str) -> None:
    for line in _lines(document):
        for path in re.findall(r"(?<![\w./-])(?:k8s|examples|docker|tests|benchmarks)/[\w./-]+", line):
            assert (ROOT / path).exists(), line
        for module in re.findall(r"python -m ((?:examples|tests|benchmarks|moe|service)\b[\w.]*)", line):
            assert find_spec(module) is not None, line


@pytest.mark.parametrize("document", [*DOCUMENTS, EXAMPLE])
def test_settings_exist(document: str) -> None:
    names = set(re.findall(r"\bSHARDYARD_([A-Z_]+)\b", "\n".join(_lines(document))))
    assert names, "a token at least, or code"
    of_compose = re.findall(r"\$\{SHARDYARD_(\w+)", _text("docker/compose.yaml"))
    fields = {*Settings.model_fields, *(field.name for field in fields_of(ClientSettings)), *map(str.lower, of_compose)}
    assert {name.lower() for name in names} <= fields


@pytest.mark.parametrize("document", DOCUMENTS)
def test_services_and_secrets_exist(document: str) -> None:
    text = "\n".join(_lines(document))
    services = set(re.findall(r"\bservice/(\S+)", text))
    assert services
    assert services <= _services()
    secrets = set(re.findall(r"create secret generic (\S+) --from-literal=(?:\w+)=", text))
    assert secrets == _secrets_asked_for()


def test_fields_of_a_job_and_kinds_of_events_exist(plane: ControlPlane) -> None:
    job = plane.job(plane.post()["id"])
    curls = [re.search(r"8321(/v1/jobs/JOB_ID\S*) +# (.*)", line) for line in _lines("README.md")]
    comments = {curl[1]: re.findall(r"\w+", curl[2]) for curl in curls if curl is not None}
    assert set(comments["/v1/jobs/JOB_ID"]) <= set(job)
    assert set(comments["/v1/jobs/JOB_ID/events"]) == {"server", "sent", *get_args(EventKind)}
    assert plane.http.get(f"/v1/jobs/{job['id']}/plan").status_code == 200
    assert "/v1/jobs/JOB_ID/plan" in comments
