"""Images in buildah's storage."""

import json
import subprocess
from pathlib import Path
from types import TracebackType

from k8s.node.container import Image
from k8s.node.manifests import NodeError


class MountedImage:
    """Root of an image while the context is entered."""

    def __init__(self, name: str, container: str) -> None:
        self._name, self._container = name, container

    def __enter__(self) -> Image:
        run = subprocess.run(["buildah", "inspect", "--type=image", self._name], capture_output=True, text=True)
        if run.returncode != 0:
            raise NodeError(
                f"buildah has no image {self._name}; build it with docker/build_unprivileged.sh {self._name}"
            )
        config = json.loads(run.stdout)["OCIv1"]["config"]
        # Left by a node that was killed. No other has it: its name has the port that this node listens on.
        subprocess.run(["buildah", "rm", self._container], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _output("from", "--pull-never", f"--name={self._container}", self._name)
        return Image(
            Path(_output("mount", self._container)), tuple(config.get("Env", ())), config.get("WorkingDir", "/")
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        subprocess.run(["buildah", "rm", self._container], stdout=subprocess.DEVNULL)


def _output(*arguments: str) -> str:
    run = subprocess.run(["buildah", *arguments], capture_output=True, text=True)
    if run.returncode != 0:
        raise NodeError(f"buildah {arguments[0]} failed: {run.stderr.strip()}")
    return run.stdout.strip()
