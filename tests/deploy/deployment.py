"""Parts of a deployment, as its files declare them: objects, pods and the image."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

Manifest = dict[str, Any]


@dataclass(frozen=True)
class PodTemplate:
    """A pod as a manifest requests it."""

    owner: str
    labels: dict[str, str]
    spec: Manifest

    @property
    def container(self) -> Manifest:
        (container,) = self.spec["containers"]
        return container

    @property
    def containers(self) -> list[Manifest]:
        """Init containers, in their order, and the container."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def environment(self) -> dict[str, str | None]:
        """SHARDYARD_ environment of the container; None for values from a Secret or from the pod itself."""
        env = self.container.get("env", [])
        return {e["name"]: e.get("value") for e in env if e["name"].startswith("SHARDYARD_")}

    def claim_of(self, path: str) -> str | None:
        """Claim that backs a path in the container."""
        mounts = {Path(mount["mountPath"]): mount["name"] for mount in self.container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for folder in (Path(path), *Path(path).parents):
            if folder in mounts:
                claim: str | None = volumes[mounts[folder]].get("persistentVolumeClaim", {}).get("claimName")
                return claim
        return None

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}


@dataclass(frozen=True)
class Overlay:
    """Objects of one overlay."""

    name: str
    objects: tuple[Manifest, ...]

    def objects_of(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.objects if manifest["kind"] == kind]

    def find(self, kind: str, name: str) -> Manifest:
        (result,) = [manifest for manifest in self.objects_of(kind) if manifest["metadata"]["name"] == name]
        return result

    @property
    def namespace(self) -> str:
        (namespace,) = self.objects_of("Namespace")
        return namespace["metadata"]["name"]

    def pods(self) -> Iterator[PodTemplate]:
        """Every pod that these objects create, for the Deployments, the CronJobs and the Ray cluster."""
        for deployment in self.objects_of("Deployment"):
            yield _pod_template(deployment["metadata"]["name"], deployment["spec"]["template"])
        for cron_job in self.objects_of("CronJob"):
            yield _pod_template(cron_job["metadata"]["name"], cron_job["spec"]["jobTemplate"]["spec"]["template"])
        for cluster in self.objects_of("RayCluster"):
            yield _pod_template("ray-head", cluster["spec"]["headGroupSpec"]["template"])
            for group in cluster["spec"]["workerGroupSpecs"]:
                yield _pod_template(f"ray-worker {group['groupName']}", group["template"])

    def pods_of(self, component: str) -> list[PodTemplate]:
        return [pod for pod in self.pods() if pod.labels["app.kubernetes.io/component"] == component]

    def pod(self, component: str) -> PodTemplate:
        (result,) = self.pods_of(component)
        return result


def _pod_template(owner: str, template: Manifest) -> PodTemplate:
    return PodTemplate(owner, template["metadata"]["labels"], template["spec"])


@dataclass(frozen=True)
class Image:
    """The image as the last stage of docker/Dockerfile sets it up."""

    instructions: tuple[tuple[str, str], ...]

    def last(self, name: str) -> str:
        return [argument for instruction, argument in self.instructions if instruction == name][-1]

    @property
    def env(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in shlex.split(self.last("ENV")))

    @classmethod
    def parse(cls, dockerfile: str) -> "Image":
        text = re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE).replace("\\\n", " ")
        instructions = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
        last_stage = max(i for i, (name, _) in enumerate(instructions) if name == "FROM")
        return cls(tuple((name, argument.strip()) for name, argument in instructions[last_stage:]))


def settings_in(environment: dict[str, str]) -> dict[str, Any]:
    """Settings of a control plane in this environment."""
    (settings,) = settings_of_environments([environment])
    return settings


def settings_of_environments(environments: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Settings of a control plane in each of these environments, read by one new process."""
    program = (
        "import json, os, sys\n"
        "from service.settings import Settings\n"
        "for environment in json.load(sys.stdin):\n"
        "    os.environ.clear()\n"
        "    os.environ.update(environment)\n"
        "    print(Settings().model_dump_json())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(environments),
        env={},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]
