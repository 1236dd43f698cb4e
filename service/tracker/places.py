"""Folders and servers of trackers, and the check of those that a job names."""

import netrc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from moe.spec import Problem, SpecError
from moe.spec.track import TrackerName, TrackSpec, WandbSpec
from service.tracker.runs import install_command, is_installed

WANDB_URL = "https://api.wandb.ai"


@dataclass(frozen=True)
class TrackerPlaces:
    """The operator's choices."""

    folder: str
    """Local folder of trackers without a server."""
    mlflow_uri: str
    """Server or database of MLflow for jobs that name none."""
    urls: tuple[str, ...] = ()
    """Servers that jobs may name."""
    wandb_url: str = ""
    """Server of W&B; empty for the public one."""
    has_wandb_key: bool = False

    def check(self, track: TrackSpec) -> None:
        """Raises SpecError for trackers that this service cannot write to."""
        if problems := list(self._problems(track)):
            raise SpecError(problems)

    def server(self, tracker: TrackerName, track: TrackSpec) -> str:
        """URL of the tracker's server or database; empty for files in the folder."""
        match tracker:
            case "mlflow":
                assert track.mlflow is not None
                return track.mlflow.server or self.mlflow_uri
            case "wandb":
                return self.wandb_url
            case _:
                return ""

    def _problems(self, track: TrackSpec) -> Iterator[Problem]:
        for tracker, _ in track.trackers():
            if not is_installed(tracker):
                yield Problem("not_installed", f"track.{tracker}", None,
                              f"requires the package {tracker} where the control plane runs",
                              f"install it: {install_command(tracker)}, or omit it")  # fmt: skip
        allowed = {url.rstrip("/") for url in (*self.urls, self.mlflow_uri) if url.startswith("http")}
        server = track.mlflow.server if track.mlflow is not None else None
        if server is not None and server not in allowed:
            yield Problem("not_allowed", "track.mlflow.server", server,
                          "must be a server that the operator allows, since it gets this service's credentials",
                          "omit it, or ask the operator to add it to SHARDYARD_TRACKING_URLS")  # fmt: skip
        if track.wandb is not None and not self._has_key(track.wandb):
            yield Problem("requires", "track.wandb.mode", track.wandb.mode,
                          "requires a key of W&B where the control plane runs",
                          "start it with WANDB_API_KEY, or use mode: offline")  # fmt: skip

    def _has_key(self, wandb: WandbSpec) -> bool:
        if wandb.mode == "offline" or self.has_wandb_key:
            return True
        with suppress(OSError, netrc.NetrcParseError):  # where `wandb login` puts it
            return netrc.netrc().authenticators(urlsplit(self.wandb_url or WANDB_URL).hostname or "") is not None
        return False
