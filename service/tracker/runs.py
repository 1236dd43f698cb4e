"""Trackers by name: the class of their runs, the package that they need, and how to install it."""

from importlib.util import find_spec

from moe.spec.track import TrackerName
from service.tracker.messages import TrackedRun
from service.tracker.mlflow_run import MLflowRun
from service.tracker.run import TrackerRun
from service.tracker.tensorboard_run import TensorBoardRun
from service.tracker.trackio_run import TrackioRun
from service.tracker.wandb_run import WandbRun

_CLASSES: dict[TrackerName, type[TrackerRun]] = {
    "mlflow": MLflowRun,
    "wandb": WandbRun,
    "tensorboard": TensorBoardRun,
    "trackio": TrackioRun,
}


def build_run(run: TrackedRun) -> TrackerRun:
    """The tracker's run, not yet open. Imports none of the trackers."""
    return _CLASSES[run.tracker](run)


def is_installed(tracker: TrackerName) -> bool:
    """Whether the tracker's package, which has its name, can be imported."""
    return find_spec(tracker) is not None


def install_command(tracker: TrackerName) -> str:
    return f"pip install 'shardyard[{tracker}]'"
