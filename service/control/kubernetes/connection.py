"""Connection to an API server through the official Python client.

The client's transport, credentials and TLS are used, not its models: they cost far more time and memory than the plain
dictionaries that the service needs.
"""

import json
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from service.control.kubernetes.errors import Misconfigured, Unavailable
from service.control.kubernetes.resource import Object

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, Configuration
    from urllib3.response import BaseHTTPResponse

INSTALL = "pip install 'shardyard[kubernetes]'"
CONNECT_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 16
_POOL_CONNECTIONS = 16
_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


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
        """Body as an object; a body that is not JSON becomes the message of a Status."""
        try:
            value = json.loads(self.body)
        except ValueError:
            value = None
        if isinstance(value, dict):
            return value
        return {"kind": "Status", "code": self.code, "message": self.body.decode(errors="replace")[:2000]}


class Connection:
    """Authenticated requests to one API server. Several threads may share it."""

    def __init__(self, client: "ApiClient", namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        """Namespace of the credentials, which requests use by default."""

    @classmethod
    def open(cls, kubeconfig: Path | None = None, context: str | None = None) -> "Connection":
        """Connection by a kubeconfig, or by the pod's service account, whose token is read again as it rotates.

        No request is made. Raises Misconfigured.
        """
        require_client()
        import urllib3
        from kubernetes.client import ApiClient, Configuration

        configuration = Configuration()
        configuration.retries = urllib3.Retry(False)  # urllib3 would sleep for any Retry-After; `retry.py` decides
        configuration.keep_alive = True
        configuration.connection_pool_maxsize = _POOL_CONNECTIONS
        if kubeconfig is None:
            namespace = _load_service_account(configuration)
        else:
            namespace = _load_kubeconfig(configuration, kubeconfig, context)
        client = ApiClient(configuration)
        client.user_agent = "shardyard"
        return cls(client, namespace)

    @property
    def url(self) -> str:
        return str(self._client.configuration.host)

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
        deadline = time.monotonic() + timeout_s
        raw = self.stream(method, path, query=query, body=body, content_type=content_type, idle_s=timeout_s)
        with _Transport(self.url):
            chunks = []
            try:
                for chunk in raw.stream(_READ_BYTES):
                    chunks.append(chunk)
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
        """Send one request and return its response, unread; reads fail after `idle_s` without a byte.

        Raises Unavailable.
        """
        headers = {"Accept": "application/json", **self._client.default_headers}
        if body is not None:
            headers["Content-Type"] = content_type
        url = f"{self.url}{path}" + (f"?{urlencode(query)}" if query else "")
        with _Transport(self.url):
            # Reads the service account's token file again when it is a minute old.
            self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
            response = self._client.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=(min(CONNECT_TIMEOUT_S, idle_s), idle_s)
            )
        raw: BaseHTTPResponse = response.response
        return raw

    def close(self) -> None:
        """Close idle connections."""
        self._client.close()


class _Transport:
    """Context that turns failures of the transport into Unavailable."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        from kubernetes.client.exceptions import ApiException
        from kubernetes.config import ConfigException
        from urllib3.exceptions import HTTPError

        # ApiException stands for a failed TLS handshake here, ConfigException for an empty token file.
        if isinstance(error, (HTTPError, OSError, ApiException, ConfigException)):
            reason = getattr(error, "reason", None) or error
            raise Unavailable(f"the API server at {self._url} does not answer: {reason}") from error


def _load_service_account(configuration: "Configuration") -> str:
    from kubernetes import config

    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException as error:
        raise Misconfigured(
            f"no service account of a pod ({error}); run in a pod that mounts its token, or name a kubeconfig"
        ) from error
    try:
        return _SERVICE_ACCOUNT_NAMESPACE.read_text().strip()
    except OSError as error:
        raise Misconfigured(f"the service account has no namespace: {error}") from error


_kubeconfig_lock = threading.Lock()


def _load_kubeconfig(configuration: "Configuration", path: Path, context: str | None) -> str:
    from kubernetes import config

    try:
        with _kubeconfig_lock:  # the client keeps temporary files of certificates in a module's table
            config.load_kube_config(
                str(path), context=context, client_configuration=configuration, persist_config=False
            )
            contexts, active = config.list_kube_config_contexts(str(path))
    except (config.ConfigException, OSError, ValueError) as error:
        raise Misconfigured(f"kubeconfig {path}: {error}") from error
    chosen = next((c for c in contexts if c["name"] == context), active)
    return str((chosen.get("context") or {}).get("namespace") or "default")


def _retry_after_s(response: "BaseHTTPResponse") -> float | None:
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):  # a date: no API server sends one
        return None
