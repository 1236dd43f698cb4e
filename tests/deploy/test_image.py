"""The image: its build file, and its install step in a clean virtual environment."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import httpx
import pytest

from service.settings import Settings
from tests.deploy.deployment import ROOT, Image, Manifest, Overlay

INSTALL_LIMIT_S = 900


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build context: the files that Dockerfile.dockerignore lets through."""
    folder = tmp_path_factory.mktemp("context")
    rules = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split("\n")
    assert "*" in rules, "nothing is sent but what is named"
    patterns = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]
    for name in (rule[1:] for rule in rules if rule.startswith("!")):
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(*patterns))
        else:
            shutil.copy2(source, target)
    return folder


@pytest.fixture(scope="module")
def dependencies(context: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Virtual environment of the image's large layer, and the version of each package that the install step selects for
    it. Packages are linked from this environment instead of installed: unpacking takes minutes."""
    folder = tmp_path_factory.mktemp("installed")
    venv, report = folder / "venv", folder / "report.json"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    tools = ["install", "--quiet", f"--constraint={context / 'constraints.txt'}", "pip", "setuptools"]
    subprocess.run([venv / "bin" / "python", "-m", "pip", *tools], check=True, env=clean_environment())
    install(context, venv, "dependencies", PIP_DRY_RUN="1", PIP_REPORT=str(report))
    versions = {
        package["metadata"]["name"]: package["metadata"]["version"]
        for package in json.loads(report.read_text())["install"]
    }
    (packages,) = (venv / "lib").glob("python3*/site-packages")
    for name, version in versions.items():
        installation = distribution(name)
        assert installation.version.split("+")[0] == version.split("+")[0], (
            f"{name}: 'make setup' installs what is pinned"
        )
        root = Path(str(installation.locate_file("")))
        for entry in {file.parts[0] for file in installation.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / entry).exists():  # packages share a namespace, such as google
                (packages / entry).symlink_to(root / entry)
    return venv, versions


@pytest.fixture(scope="module")
def image_venv(context: Path, dependencies: tuple[Path, dict[str, str]]) -> Path:
    """Virtual environment made by the image's install step, in the same two parts."""
    venv, _ = dependencies
    install(context, venv, "project")
    return venv


def install(context: Path, venv: Path, part: str, **variables: str) -> None:
    run = subprocess.run(
        ["bash", context / "docker" / "install.sh", venv, part],
        env={**clean_environment(), "PYTHON": sys.executable, **variables},
        capture_output=True, text=True, timeout=INSTALL_LIMIT_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]


def clean_environment() -> dict[str, str]:
    """This process's environment without references to its virtual environment."""
    return {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV" and not k.startswith("PYTHON")}


def compiling_nothing() -> dict[str, str]:
    """Environment in which Python writes no bytecode: only the install step may compile."""
    return {**clean_environment(), "PYTHONDONTWRITEBYTECODE": "1"}


def run_in(venv: Path, *command: str) -> str:
    """Output of a command of the virtual environment, run outside this repository."""
    run = subprocess.run(
        [venv / "bin" / command[0], *command[1:]], env=compiling_nothing(), cwd=venv.parent, timeout=120,
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, f"{command}: {run.stdout[-2000:]}{run.stderr[-2000:]}"
    return run.stdout


def control_plane_command(image: Image) -> list[str]:
    return json.loads(image.last("CMD"))


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_LIMIT_S + 60)
def test_install_step_makes_a_whole_installation(image_venv: Path, image: Image) -> None:
    program = "import moe.spec, service.control.app; print(moe.__file__, service.__file__)"
    for place in run_in(image_venv, "python", "-c", program).split():
        assert Path(place).is_relative_to(image_venv)
    assert "submit" in run_in(image_venv, "shardyard", "--help")
    assert run_in(image_venv, *control_plane_command(image), "--help")
    ray = "from importlib.metadata import entry_points as of; of(group='console_scripts')['ray'].load()()"
    assert "2." in run_in(image_venv, "python", "-c", ray, "--version")  # called by KubeRay and the compose file
    # On a read-only root file system, Python cannot write bytecode and would compile at every start.
    (packages,) = (image_venv / "lib").glob("python3*/site-packages")
    for source in ("moe/spec/model.py", "service/settings.py"):
        cache = (packages / source).parent / "__pycache__"
        assert list(cache.glob(f"{Path(source).stem}.*.pyc")), source


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_LIMIT_S + 60)
def test_installed_control_plane_answers_its_probes(image_venv: Path, image: Image, tmp_path: Path) -> None:
    """As in a container: its command, its environment, and a Ray cluster that is not up yet."""
    environment = {
        **compiling_nothing(),
        **image.env,
        "PATH": os.environ["PATH"],
        "SHARDYARD_STATE_DIR": str(tmp_path / "state"),
        "SHARDYARD_STORAGE_ROOTS": json.dumps([str(tmp_path / "jobs")]),
        "SHARDYARD_CACHE_DIR": str(tmp_path / "cache"),
        "SHARDYARD_TOKEN": "0123456789abcdef",
        "SHARDYARD_RAY_DASHBOARD_URL": "http://127.0.0.1:9",
    }
    command = [image_venv / "bin" / control_plane_command(image)[0], *control_plane_command(image)[1:], "--port=0"]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            url = announced_url(process)
            as_kubelet = {"Host": "10.244.0.7:8321"}  # the kubelet calls pods by address
            assert httpx.get(f"{url}/healthz", headers=as_kubelet).status_code == 200
            assert httpx.get(f"{url}/readyz", headers=as_kubelet).status_code == 200
            assert httpx.get(f"{url}/v1/jobs").status_code == 401
            process.terminate()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


def announced_url(process: subprocess.Popen[str]) -> str:
    """URL that a starting control plane prints for its API."""
    lines: list[str] = []
    while line := process.stdout.readline():
        lines.append(line)
        if match := re.search(r"API +(http://\S+)", line):
            return match[1]
    raise AssertionError("the control plane ended without saying where it listens:\n" + "".join(lines))


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_LIMIT_S + 60)
def test_install_step_takes_the_pinned_versions(dependencies: tuple[Path, dict[str, str]]) -> None:
    version_pins = dict(line.split("==") for line in pins())
    _, versions = dependencies
    assert {"torch", "ray", "fastapi"} <= versions.keys()
    for package, version in versions.items():
        name = re.sub(r"[-_.]+", "-", package).lower()
        assert version.split("+")[0] == version_pins.get(name), name


def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_dependency_is_pinned_once() -> None:
    names = [line.split("==")[0] for line in pins()]
    assert all(re.fullmatch(r"[a-z0-9-]+==([0-9]+!)?[0-9][0-9a-z.]*", line) for line in pins())
    assert names == sorted(set(names))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        assert re.split(r"[\[<>=]", requirement)[0].lower() in names, requirement


def test_unknown_part_is_refused(context: Path, tmp_path: Path) -> None:
    command = ["bash", context / "docker" / "install.sh", tmp_path / "venv", "everything"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert "part (=everything) is none of all, dependencies, project" in run.stderr
    assert not (tmp_path / "venv").exists()


def test_image_runs_as_a_user_that_is_not_root_and_holds_no_secret(image: Image, overlay: Overlay) -> None:
    user, group = image.last("USER").split(":")
    assert int(user) > 0
    for pod in overlay.pods():
        security = pod.spec["securityContext"]
        assert (security["runAsUser"], security["runAsGroup"]) == (int(user), int(group)), pod.owner
    assert not [name for name in image.env if re.search("TOKEN|SECRET|PASSWORD|KEY", name)]
    assert int(image.last("EXPOSE")) == Settings.model_fields["port"].default
    assert json.loads(image.last("ENTRYPOINT"))[0] == "tini", "signals reach the program"
    assert any("tini" in argument for _, argument in image.instructions)


def test_one_command_starts_the_control_plane_everywhere(image: Image, overlay: Overlay, compose: Manifest) -> None:
    command = control_plane_command(image)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert command[0] in project["scripts"]
    assert overlay.pod("control-plane").container["command"] == ["tini", "--", *command]
    assert "command" not in compose["services"]["control-plane"], "the image's own"
    # Without it, `shardyard up` starts its own Ray next to the control plane.
    assert "SHARDYARD_RAY_DASHBOARD_URL" in compose["services"]["control-plane"]["environment"]
    environment = overlay.pod("control-plane").environment
    assert "SHARDYARD_RAY_DASHBOARD_URL" in environment or environment["SHARDYARD_LAUNCHER"] == "kuberay"


def test_build_is_in_stages_and_takes_a_torch_build() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    bases = re.findall(r"^FROM (\S+)", dockerfile, flags=re.MULTILINE)
    assert bases == ["${BASE}", "${BASE}"]
    (base,) = re.findall(r"^ARG BASE=(\S+)", dockerfile, flags=re.MULTILINE)
    assert re.fullmatch(r"python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert {"TORCH_VERSION", "TORCH_INDEX"} <= set(re.findall(r"^ARG (\w+)", dockerfile, flags=re.MULTILINE))
