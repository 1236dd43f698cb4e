"""Experiment trackers that a job is written to."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from moe.spec.base import Count, Spec, Text
from moe.spec.errors import Problem, RuleError

TrackerName = Literal["mlflow", "wandb", "tensorboard", "trackio"]
TRACKER_NAMES: tuple[TrackerName, ...] = get_args(TrackerName)

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9 ._-]{0,126}[A-Za-z0-9])?")


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise RuleError("invalid_value", "must have 1 to 128 letters, digits, spaces, '.', '_' and '-', starting and "
                        "ending with a letter or digit", "rename it")  # fmt: skip
    return text


def _server_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_server = False
    if not is_server or not url.isprintable() or any(character.isspace() for character in url):
        raise RuleError("invalid_value", "must be the http or https URL of a server", "use https://HOST or http://HOST")
    if parts.username or parts.password or parts.query or parts.fragment:
        remedy = "set the tracker's own variables (MLFLOW_TRACKING_TOKEN) where the control plane runs"
        raise RuleError("invalid_value", "must not contain credentials, '?' or '#'", remedy)
    return url.rstrip("/")


Name = Annotated[Text, AfterValidator(_name)]
ServerUrl = Annotated[Text, Field(max_length=1024), AfterValidator(_server_url)]


class _AppendOnlySpec(Spec):
    """Fields of trackers that cannot replace a step's values."""

    wait_for_checkpoint: bool = Field(default=False, strict=True)
    """Write steps once a committed checkpoint contains them, so that none is ever repeated. By default they are written
    as they are recorded, and steps that are repeated after a crash keep the values that were written first."""


class MLflowSpec(_AppendOnlySpec):
    """Run in an MLflow tracking server or database."""

    experiment: Name = "shardyard"
    server: ServerUrl | None = None
    """Tracking server, one of those that the operator allows. Default: the operator's."""


_MLFLOW_TAGS = ("mlflow.", "shardyard.")
"""Beginnings of names of tags, in small letters, that labels must not have."""


class WandbSpec(_AppendOnlySpec):
    """Run in Weights & Biases."""

    project: Name = "shardyard"
    entity: Name | None = None
    """User or team. Default: that of the API key."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files for `wandb sync`, without any key."""


class TensorBoardSpec(Spec):
    """Event files for TensorBoard."""


_TRACKIO_PREFIX = "registry"
_TRACKIO_SUFFIX = re.compile(r".+[^A-Za-z0-9](system|configs|traces|artifacts|[a-z]+[^A-Za-z0-9]versions|artifact.+)")
"""Endings of names that Trackio needs for a project's other tables."""


def _trackio_project(name: str) -> str:
    if name.lower().startswith(_TRACKIO_PREFIX) or _TRACKIO_SUFFIX.fullmatch(name.lower()):
        raise RuleError("invalid_value", "must not begin with 'registry', nor end like a table of Trackio (_system, "
                        "_configs, _traces, _artifacts)", "rename it")  # fmt: skip
    return name


class TrackioSpec(Spec):
    """Run in a local Trackio project."""

    project: Annotated[Name, AfterValidator(_trackio_project)] = "shardyard"


class TrackSpec(Spec):
    """Experiment trackers. The control plane writes them from the job's records, beside the training."""

    mlflow: MLflowSpec | None = None
    wandb: WandbSpec | None = None
    tensorboard: TensorBoardSpec | None = None
    trackio: TrackioSpec | None = None
    layers: bool = Field(default=False, strict=True)
    """Also write the expert balance of every MoE layer by itself."""
    every_steps: Count = 1
    """Write the steps that are multiples of this, and those with an evaluation."""

    def trackers(self) -> Iterator[tuple[TrackerName, Spec]]:
        """Chosen trackers with their fields."""
        for name in TRACKER_NAMES:
            if (tracker := getattr(self, name)) is not None:
                yield name, tracker

    def problems(self, labels: Mapping[str, str], *, has_experts: bool) -> Iterator[Problem]:
        """Problems of fields that have no effect without a tracker or without experts, and of `labels` with names that
        tags of MLflow have."""
        for label in labels:
            if self.mlflow is not None and label.lower().startswith(_MLFLOW_TAGS):
                yield Problem("not_allowed", f"labels.{label}", labels[label],
                              "has the name of a tag that MLflow or Shardyard sets in track.mlflow",
                              "rename the label, or omit track.mlflow")  # fmt: skip
        for field, value in (("layers", self.layers), ("every_steps", self.every_steps)):
            if value != type(self).model_fields[field].default and not any(self.trackers()):
                yield Problem("requires", f"track.{field}", value, "requires a tracker",
                              "name one in track, or omit it")  # fmt: skip
        if self.layers and not has_experts:
            yield Problem("not_applicable", "track.layers", True, "does not apply to a model without experts",
                          "omit it")  # fmt: skip
