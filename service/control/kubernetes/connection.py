"""Connection to an API server through the official Python client.

Its credentials and TLS are used, which urllib3 carries; not its models, which cost far more time and memory than the
plain dictionaries that the service needs.
"""

import json
import socket
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import yaml
from urllib3.exceptions import HTTPError
from urllib3.util import Timeout

from service.control.kubernetes.errors import Misconfigured, Unavailable
from service.control.kubernetes.resource import Object

if TYPE_CHECKING:
    from kubernetes.client import Configuration
    from urllib3 import PoolManager
    from urllib3.response import BaseHTTPResponse

INSTALL = "pip install 'shardyard[kubernetes]'"
CONNECT_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 16
MAX_RESPONSE_BYTES = 1 << 28
"""Longest response: a page of a hundred objects of etcd's limit, 1.5 MiB, and some."""
_POOL_CONNECTIONS = 16
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""A watch over a dead node is silent for a minute at most."""
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with the token, certificate and namespace of the service account, in a pod."""


def require_client() -> None:
    """Raise Misconfigured unless the official client is installed."""
    if find_spec("kubernetes") is None:
        raise Misconfigured(
            f"SHARDYARD_LAUNCHER=kuberay requires the Kubernetes client, which is not installed: {INSTALL}"
        )


@dataclass(frozen=True)
class Response:
    """A response that was read to its end."""

    code: int
    body: bytes
    retry_after_s: float | None

    def object(self) -> Object:
        """Body as an object; a body that is not JSON becomes the message of a Status.

        Raises Unavailable for a success that has no object, as a proxy or a login page answers.
        """
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        if 200 <= self.code < 300:
            raise Unavailable(f"the API server answered {self.code} without an object ({self.body[:80]!r})")
        return {"kind": "Status", "code": self.code, "message": self.body.decode(errors="replace")[:2000]}


class Connection:
    """Authenticated requests to one API server. Several threads may share it."""

    def __init__(self, configuration: "Configuration", pool: "PoolManager", namespace: str) -> None:
        self._configuration, self._pool = configuration, pool
        self.namespace = namespace
        """Namespace of the credentials, which requests use by default."""

    @classmethod
    def open(
        cls, kubeconfig: Path | None = None, context: str | None = None, *, service_account: Path = SERVICE_ACCOUNT
    ) -> "Connection":
        """Connection by a kubeconfig, or by the pod's service account, whose token may rotate.

        No request is made. Raises Misconfigured.
        """
        require_client()
        from kubernetes.client import Configuration
        from kubernetes.client.rest import RESTClientObject
        from urllib3.connection import HTTPConnection

        configuration = Configuration()
        configuration.connection_pool_maxsize = _POOL_CONNECTIONS
        configuration.socket_options = [*HTTPConnection.default_socket_options, *_KEEP_ALIVE]
        if kubeconfig is None:
            namespace = _load_service_account(configuration, service_account)
        else:
            namespace = _load_kubeconfig(configuration, kubeconfig, context)
        return cls(configuration, RESTClientObject(configuration).pool_manager, namespace)

    @property
    def url(self) -> str:
        return str(self._configuration.host)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str],
        body: Any = None,
        content_type: str = "application/json",
        timeout_s: float,
    ) -> Response:
        """Send one request and read its response within `timeout_s`. Raises Unavailable."""
        deadline, num_bytes = time.monotonic() + timeout_s, 0
        raw = self.stream(method, path, query=query, body=body, content_type=content_type, idle_s=timeout_s)
        with _Transport(self.url):
            chunks = []
            try:
                while chunk := raw.read1(_READ_BYTES):  # what is there: `stream` would wait for so many bytes
                    chunks.append(chunk)
                    if (num_bytes := num_bytes + len(chunk)) > MAX_RESPONSE_BYTES:
                        raise OSError(f"its response is longer than {MAX_RESPONSE_BYTES >> 20} MiB")
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"no complete response within {timeout_s:g} s")
                raw.release_conn()
            except BaseException:
                raw.close()
                raise
        return Response(raw.status, b"".join(chunks), _retry_after_s(raw))

    def stream(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str],
        body: Any = None,
        content_type: str = "application/json",
        idle_s: float,
    ) -> "BaseHTTPResponse":
        """Send one request and return its response, unread; reads fail after `idle_s` without a byte. A token that is
        refused is read again, once: it may just have been replaced.

        Raises Unavailable.
        """
        headers = {"Accept": "application/json", "User-Agent": "shardyard"}
        content = None
        if body is not None:
            headers["Content-Type"] = content_type
            content = json.dumps(body)
        url = f"{self.url}{path}" + (f"?{urlencode(query)}" if query else "")
        response = self._open(method, url, content, headers, idle_s)
        if response.status != HTTPStatus.UNAUTHORIZED:
            return response
        response.close()
        return self._open(method, url, content, headers, idle_s)

    def _open(
        self, method: str, url: str, content: str | None, headers: dict[str, str], idle_s: float
    ) -> "BaseHTTPResponse":
        with _Transport(self.url):
            if token := self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization"):
                headers = {**headers, "Authorization": token}
            return self._pool.urlopen(
                method,
                url,
                body=content,
                headers=headers,
                timeout=Timeout(connect=min(CONNECT_TIMEOUT_S, idle_s), read=idle_s),
                # urllib3 would sleep for any Retry-After; `retry.py` decides.
                retries=False,
                redirect=False,
                preload_content=False,
            )

    def close(self) -> None:
        """Close idle connections."""
        self._pool.clear()


class _Transport:
    """Context that turns failures of the transport into Unavailable."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, (HTTPError, OSError)):
            raise Unavailable(f"the API server at {self._url} does not answer: {error}") from error


def _load_service_account(configuration: "Configuration", folder: Path) -> str:
    from kubernetes.config import ConfigException
    from kubernetes.config.incluster_config import InClusterConfigLoader

    token_path = folder / "token"
    loader = InClusterConfigLoader(str(token_path), str(folder / "ca.crt"), try_refresh_token=False)
    try:
        loader.load_and_set(configuration)
        namespace = (folder / "namespace").read_text().strip()
    except (ConfigException, OSError) as error:
        raise Misconfigured(
            f"no service account of a pod in {folder} ({error}); mount its token, or name a kubeconfig"
        ) from error

    def read_token(configuration: "Configuration") -> None:
        # The kubelet replaces the file before the token expires; the official client would look once a minute.
        configuration.api_key["BearerToken"] = f"Bearer {token_path.read_text().strip()}"

    configuration.refresh_api_key_hook = read_token
    return namespace


_kubeconfig_lock = threading.Lock()


def _load_kubeconfig(configuration: "Configuration", path: Path, context: str | None) -> str:
    from kubernetes import config

    try:
        with _kubeconfig_lock:  # the client keeps temporary files of certificates in a module's table
            config.load_kube_config(
                str(path), context=context, client_configuration=configuration, persist_config=False
            )
            contexts, active = config.list_kube_config_contexts(str(path))
    except (config.ConfigException, OSError, ValueError, yaml.YAMLError) as error:
        raise Misconfigured(f"kubeconfig {path}: {error}") from error
    selected = next((c for c in contexts if c["name"] == context), active)
    return str((selected.get("context") or {}).get("namespace") or "default")


def _retry_after_s(response: "BaseHTTPResponse") -> float | None:
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):  # a date: no API server sends one
        return None
