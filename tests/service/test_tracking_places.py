"""Trackers and servers that a job may name."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from moe.spec import JobSpec
from moe.spec.track import TrackSpec
from service.settings import Settings
from service.tracker.places import TrackerPlaces
from service.tracker.runs import is_installed
from tests.refusals import expect_problem
from tests.service.control_plane import spec

URL = "https://mlflow.example.org"
SECRET = "a-secret-key"


def check(track: dict[str, Any], **places: Any) -> None:
    operator: dict[str, Any] = {"folder": "/f", "mlflow_uri": "sqlite:////f/mlflow.db", **places}
    TrackerPlaces(**operator).check(TrackSpec(**track))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_server_must_be_one_that_the_operator_allows() -> None:
    with expect_problem("not_allowed", "track.mlflow.server", URL):
        check({"mlflow": {"server": URL}})
    check({"mlflow": {"server": URL + "/"}}, urls=(URL,))
    check({"mlflow": {"server": URL}}, mlflow_uri=URL + "/")
    check({"mlflow": {}})


def test_wandb_needs_a_key_unless_it_is_offline(home: Path) -> None:
    with expect_problem("requires", "track.wandb.mode", "online"):
        check({"wandb": {}})
    check({"wandb": {}}, has_wandb_key=True)
    check({"wandb": {"mode": "offline"}})
    netrc = home / ".netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {SECRET}\n")
    netrc.chmod(0o600)
    check({"wandb": {}})
    with expect_problem("requires", "track.wandb.mode", "online"):
        check({"wandb": {}}, wandb_url="https://wandb.example.org")


def test_a_tracker_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.tracker.places.is_installed", lambda tracker: tracker != "trackio")
    with expect_problem("not_installed", "track.trackio"):
        check({"trackio": {}, "tensorboard": {}})


def test_installed_packages_are_known() -> None:
    assert is_installed("tensorboard")


@pytest.mark.parametrize(("path", "value", "code"), [
    ("mlflow.server", "ftp://host", "invalid_value"),
    ("mlflow.server", "sqlite:////etc/passwd", "invalid_value"),
    ("mlflow.server", "https://", "invalid_value"),
    ("mlflow.server", "https://host:99999", "invalid_value"),
    ("mlflow.server", "https://me:password@host", "invalid_value"),
    ("mlflow.server", "https://host?token=x", "invalid_value"),
    ("mlflow.server", "https://ho st", "invalid_value"),
    ("mlflow.experiment", "../x", "invalid_value"),
    ("wandb.project", "", "invalid_value"),
    ("wandb.mode", "disabled", "not_a_choice"),
    ("wandb.wait_for_checkpoint", 1, "wrong_type"),
    ("trackio.project", "registry-models", "invalid_value"),
    ("trackio.project", "model_artifacts", "invalid_value"),
    ("tensorboard.folder", "/tmp", "unknown_key"),
])  # fmt: skip
def test_fields_of_trackers(path: str, value: Any, code: Any) -> None:
    tracker, field = path.split(".")
    with expect_problem(code, f"track.{path}", value):
        JobSpec.parse(spec(track={tracker: {field: value}}))


def test_fields_without_effect() -> None:
    with expect_problem("requires", "track.layers", True):
        JobSpec.parse(spec(track={"layers": True}))
    with expect_problem("requires", "track.every_steps", 10):
        JobSpec.parse(spec(track={"every_steps": 10}))
    with expect_problem("not_applicable", "track.layers", True):
        JobSpec.parse(spec(model={"preset": "gshard-tiny-dense"}, track={"layers": True, "tensorboard": {}}))
    assert JobSpec.parse(spec(track={"layers": True, "tensorboard": {}})).track.layers


@pytest.mark.parametrize("label", ["mlflow.runName", "MLflow.user", "shardyard.step"])
def test_labels_must_not_be_tags_that_mlflow_uses(label: str) -> None:
    labels = {label: "a"}
    with expect_problem("not_allowed", f"labels.{label}", "a"):
        JobSpec.parse(spec(labels=labels, track={"mlflow": {}}))
    assert JobSpec.parse(spec(labels=labels, track={"tensorboard": {}})).labels == labels


def test_settings_that_are_empty_have_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDYARD_TRACKING_DIR", "")
    monkeypatch.setenv("SHARDYARD_MLFLOW_TRACKING_URI", "")
    settings = Settings(state_dir=tmp_path)
    assert settings.tracking_dir == tmp_path / "tracking"
    assert settings.mlflow_tracking_uri == f"sqlite:///{tmp_path}/tracking/mlflow.db"


def test_settings_follow_the_variables_of_the_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(state_dir=tmp_path)
    assert settings.tracking_dir == tmp_path / "tracking"
    assert settings.mlflow_tracking_uri == f"sqlite:///{tmp_path}/tracking/mlflow.db"
    assert not settings.has_wandb_key
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URL)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    settings = Settings(state_dir=tmp_path, tracking_dir=tmp_path / "t")
    assert (settings.tracking_dir, settings.mlflow_tracking_uri) == (tmp_path / "t", URL)
    assert settings.has_wandb_key
    assert SECRET not in repr(settings)


@pytest.mark.parametrize("uri", ["./mlruns", "file:///mlruns", "ftp://host"])
def test_mlflow_keeps_runs_in_a_server_or_database(tmp_path: Path, uri: str) -> None:
    with pytest.raises(ValidationError, match="mlflow_tracking_uri"):
        Settings(state_dir=tmp_path, mlflow_tracking_uri=uri)
