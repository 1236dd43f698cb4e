"""Launchers of RayJobs against the API server of the tests, and what they launch."""

import time
from pathlib import Path
from typing import Any

from service.control.launcher.kuberay.launcher import KubeRayLauncher
from service.control.launcher.kuberay.names import ray_job_name
from service.control.launcher.launcher import LauncherUnavailable, Observation
from service.kuberay_settings import KubeRaySettings
from service.wire.launch import Launch
from tests.kubernetes.api_server import ApiServer
from tests.processes import DEADLINE_S, await_that
from tests.procs.launching import launch as small_launch

POOL = {"name": "cpu", "nodes": 2, "gpus_per_node": 0, "cpus_per_node": 2, "memory": "16Gi"}


class Clock:
    """Time that a test may advance."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset_s


def kuberay_settings(**values: Any) -> KubeRaySettings:
    return KubeRaySettings.model_validate({"image": "shardyard:test", "pools": [POOL], **values})


def launcher_on(
    server: ApiServer, clock: Clock | None = None, *, wait_s: float = DEADLINE_S, timeout_s: float = 10.0, **values: Any
) -> KubeRayLauncher:
    """A launcher that has listed the server's objects. By default its calls wait until their requests have ended."""
    api = server.api(timeout_s=timeout_s)
    launcher = KubeRayLauncher(api, kuberay_settings(**values), clock=clock or Clock(), wait_s=wait_s)
    await_that(lambda: answers(launcher))
    return launcher


def answers(launcher: KubeRayLauncher) -> bool:
    try:
        launcher.cluster()
    except LauncherUnavailable:
        return False
    return True


def new_launch(folder: Path, **resources: Any) -> Launch:
    """Launch of a new job, on the pool."""
    launch = small_launch(folder, resources={"num_workers": 1, **resources})
    return launch.model_copy(update={"pool": POOL["name"], "owner": "tester"})


def name_of(launch: Launch) -> str:
    return ray_job_name(launch.submission_id)


def await_observation(launcher: KubeRayLauncher, launch: Launch, **fields: Any) -> Observation:
    """The observation, once it has these fields; `waiting` and `message` are parts of the text."""
    observation = Observation(status="unknown")

    def is_there() -> bool:
        nonlocal observation
        observation = launcher.observe(launch.submission_id)
        return all(_matches(getattr(observation, name), value) for name, value in fields.items())

    await_that(is_there, lambda: f"{observation} has not {fields}", timeout_s=60)
    return observation


def _matches(value: Any, expected: Any) -> bool:
    return expected in value if isinstance(value, str) and expected else bool(value == expected)
