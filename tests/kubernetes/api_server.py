"""The tests' API server as a process of its own: started, killed, restarted from its file, and controlled."""

import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from service.control.kubernetes import Connection, KubernetesApi, Resource
from service.control.kubernetes.retry import Backoff, RetryPolicy
from tests.kubernetes.apiserver.faults import Denial, Fault
from tests.kubernetes.certificate import write_certificate
from tests.processes import await_that

ROOT = Path(__file__).parents[2]
CRDS = ROOT.parent / "shared" / "kuberay-crds"
DEFINITIONS = (CRDS / "ray.io_rayjobs.yaml", CRDS / "ray.io_rayclusters.yaml", Path(__file__).parent / "kueue.yaml")
ADMIN_TOKEN = "admin-token"
CONTROLLER_TOKEN = "controller-token"
CONTROLLER = "system:serviceaccount:shardyard:shardyard"

Object = dict[str, Any]


class ApiServer:
    """A server with one namespace, an administrator (the cluster's controllers) and the service account of ours."""

    def __init__(
        self,
        folder: Path,
        *,
        namespace: str = "shardyard",
        rules: list[Object] | None = None,
        bookmark_s: float = 1.0,
        definitions: tuple[Path, ...] = DEFINITIONS,
        persist: bool = True,
    ) -> None:
        """`rules` are those of the service account's Role; None allows it everything."""
        self.namespace = namespace
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._port = 0
        account: Object = {"user": CONTROLLER}
        if rules is not None:
            account["rules"] = [{"namespace": namespace, **rule} for rule in rules]
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardyard-tests"
        cache_dir.mkdir(parents=True, exist_ok=True)
        self._config: Object = {
            "state": str(folder / "api-server.jsonl") if persist else None,
            "definitions": [str(path) for path in definitions],
            "cache_dir": str(cache_dir),
            "namespaces": [namespace],
            "identities": {ADMIN_TOKEN: {"user": "system:admin"}, CONTROLLER_TOKEN: account},
            "bookmark_s": bookmark_s,
        }
        self.certificate, key = write_certificate(folder)
        self._config |= {"certificate": str(self.certificate), "key": str(key)}
        self._client = httpx.Client(verify=ssl.create_default_context(cafile=str(self.certificate)), timeout=60)

    def __enter__(self) -> "ApiServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._client.close()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start the process on the port of its last run, with the objects in its file."""
        path = self._folder / "api-server.json"
        path.write_text(json.dumps({**self._config, "port": self._port}))
        command = [sys.executable, "-m", "tests.kubernetes.apiserver", str(path)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the API server ended with {self._process.wait()}"
        self._port = int(line)

    def kill(self) -> None:
        """SIGKILL the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # closes the pipes
            self._process = None

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Stop the process: connections are accepted, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    def kubeconfig(self, token: str = CONTROLLER_TOKEN) -> Path:
        """Kubeconfig file with these credentials."""
        path = self._folder / f"kubeconfig-{token}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {"name": "test", "cluster": {"server": self.url, "certificate-authority": str(self.certificate)}}
            ],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": self.namespace}}],
        }
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return path

    def api(self, token: str = CONTROLLER_TOKEN, **options: Any) -> KubernetesApi:
        """Client under test with these credentials; it retries fast."""
        options.setdefault("retry", RetryPolicy(backoff=Backoff(first_s=0.01, longest_s=0.05)))
        return KubernetesApi(Connection.open(self.kubeconfig(token)), **options)

    def admin(self, method: str, resource: Resource, name: str = "", body: Any = None, **options: Any) -> Object:
        """Request of the cluster's controllers, by another client than the one under test. Raises for failures."""
        subresource, query = options.pop("subresource", ""), options.pop("query", {})
        content_type = options.pop("content_type", "application/json")
        response = self._client.request(
            method,
            self.url + resource.path(self.namespace, name, subresource),
            params=query,
            content=None if body is None else json.dumps(body),
            headers={"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": content_type},
        )
        response.raise_for_status()
        return dict(response.json())

    def set_status(self, resource: Resource, name: str, status: Object) -> Object:
        """Merge fields into the status of an object."""
        return self.admin(
            "PATCH",
            resource,
            name,
            {"status": status},
            subresource="status",
            content_type="application/merge-patch+json",
        )

    def objects(self, resource: Resource) -> dict[str, Object]:
        """Objects by name, as the server has them."""
        return {item["metadata"]["name"]: item for item in self.admin("GET", resource)["items"]}

    def fault(self, kind: Any, **options: Any) -> None:
        """Let the next matching requests fail; see Fault."""
        self._control("fault", Fault(kind, **options).to_json())

    def heal(self) -> None:
        """Forget the faults that nothing met yet."""
        self._control("heal", {})

    def deny(self, *denials: Denial) -> None:
        """Refuse the writes that match; replaces earlier denials."""
        self._control("deny", [denial.__dict__ for denial in denials])

    def compact(self, version: int | None = None) -> None:
        """Forget the history, so that older watches and pages expire (410)."""
        self._control("compact", {} if version is None else {"version": version})

    def load(self, resource: Resource, objects: list[Object]) -> None:
        """Store objects as they are, with their status and uid."""
        triple = [resource.group, resource.version, resource.plural]
        self._control("load", [{"resource": triple, "object": value} for value in objects])

    def num_watches(self) -> int:
        """Watches that are being answered."""
        return int(self._control("state", {})["num_watches"])

    def await_bookmarks(self, num_watches: int) -> None:
        """Wait until so many watches have the newest version."""

        def is_told() -> bool:
            state = self._control("state", {})
            return bool(state["num_watches"] == num_watches and state["told_version"] == state["version"])

        await_that(is_told)

    def requests(self, *, user: str = CONTROLLER) -> list[Object]:
        """Requests of a user since the start of the process or the last `forget_requests`, in order."""
        return _of_user(self._client.get(f"{self.url}/testing/requests").json(), user)

    def crash(self, *, user: str = CONTROLLER) -> list[Object]:
        """Requests of a user until now; the process dies of SIGKILL before another is answered."""
        assert self._process is not None
        entries = self._client.post(f"{self.url}/testing/crash").json()
        self._process.wait()
        self.kill()
        return _of_user(entries, user)

    def forget_requests(self) -> None:
        self._client.delete(f"{self.url}/testing/requests").raise_for_status()

    def _control(self, action: str, body: Any) -> Object:
        response = self._client.post(f"{self.url}/testing/{action}", json=body)
        response.raise_for_status()
        return dict(response.json())


def _of_user(entries: list[Object], user: str) -> list[Object]:
    return [entry for entry in entries if entry["user"] == user]
