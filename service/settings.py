"""Settings of the control plane, read once from `SHARDYARD_*` or arguments."""

import ipaddress
import os
import sys
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from moe.spec.module import CODE_REMEDY, is_code
from moe.storage.home import expand_home
from service.kuberay_settings import KubeRaySettings
from service.wire.webhooks import WebhookSpec


class Settings(BaseSettings):
    """The operator's settings. Raises pydantic's ValidationError for unsafe ones."""

    model_config = SettingsConfigDict(
        env_prefix="SHARDYARD_",
        # One level: SHARDYARD_KUBERAY_SERVICE_ACCOUNT is kuberay.service_account.
        env_nested_delimiter="_",
        env_nested_max_split=1,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # the input holds the token
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8321, ge=0, le=65535)
    token: SecretStr | None = None
    """Bearer token of every request; required to listen on anything but loopback."""
    session_hours: float = Field(default=168.0, gt=0, le=8760)
    """Hours for which a browser stays logged in."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names (without port) of this service, besides loopback and `host`."""
    owner: str = "local"
    """Owner of the jobs that are posted here."""

    state_dir: Path = Path("~/.shardyard")
    """Private folder of the database and, by default, storage and caches."""
    database_url: str = ""
    """SQLAlchemy URL; by default SQLite in `state_dir`."""
    storage_roots: tuple[str, ...] = ()
    """fsspec URLs or paths under which jobs may write, the first by default; by default `state_dir/storage`."""
    data_roots: tuple[str, ...] = ()
    """fsspec URLs or paths of corpora; if empty, only the `catalogs` corpus is available."""
    cache_dir: Path = Path()
    """Prepared corpora; by default `state_dir/cache`."""

    prepare_catalogs: bool = True
    """Whether `shardyard up` prepares the `catalogs` corpus while its Ray starts."""

    allowed_code: tuple[str, ...] = ()
    """Functions of users' modules that jobs may name, each exactly as `module:function`. Job and planning processes
    import them from installed packages or PYTHONPATH, and run them with all their rights; this service never does."""
    planning_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time to plan one job of a user's module."""
    planning_memory_bytes: int = Field(default=8 * 1024**3, gt=0)
    """Data memory of a process that plans a user's module."""

    generation_max_tokens: int = Field(default=4096, ge=1)
    """Most tokens that one generation request may ask for."""
    generation_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time to generate one text."""
    generation_load_timeout_s: float = Field(default=300.0, gt=0)
    """Longest time to load a model."""
    generation_memory_bytes: int | None = Field(default=None, gt=0)
    """Data memory of the generator process, including the model's weights; unlimited if None."""
    generation_idle_s: float = Field(default=300.0, gt=0)
    """Time after the last text at which the model is unloaded."""

    tracking_dir: Path = Path()
    """Folder of experiment trackers without a server; by default `state_dir/tracking`. Only the control plane's machine
    writes there."""
    mlflow_tracking_uri: str = ""
    """URL of the MLflow server or database of jobs that name no server; by default MLFLOW_TRACKING_URI, or a SQLite
    file in `tracking_dir`."""
    tracking_urls: tuple[str, ...] = ()
    """Further MLflow servers that jobs may name. They get the credentials in this service's environment."""
    wandb_base_url: str = ""
    """URL of the Weights & Biases server; by default WANDB_BASE_URL, or the public one."""
    has_wandb_key: bool = False
    """Whether there is a key of W&B; by default, whether WANDB_API_KEY is set."""
    tracking_interval_s: float = Field(default=10.0, gt=0)
    """Interval of writes to trackers; writing many steps at once costs far less than one by one."""
    tracking_patience_s: float = Field(default=600.0, gt=0)
    """Longest time after a job's end in which its records wait for a tracker that does not respond."""

    webhooks: tuple[WebhookSpec, ...] = ()
    """Webhooks of the operator, a JSON list with the fields of `POST /v1/webhooks`; users cannot remove them."""
    webhook_networks: tuple[str, ...] = ()
    """Networks, like `10.0.0.0/8`, whose addresses webhooks may use although they are not public."""
    webhook_timeout_s: float = Field(default=10.0, gt=0)
    """Longest time for a receiver to respond, from the DNS lookup to the end of the response headers."""
    webhook_retry_s: float = Field(default=10.0, gt=0)
    """Delay of the second attempt of a delivery; it doubles with each attempt, up to an hour."""
    webhook_give_up_s: float = Field(default=3 * 86_400.0, gt=0)
    """Time for which a delivery is attempted."""
    webhook_interval_s: float = Field(default=0.5, gt=0)
    """Interval of searches for deliveries that are due."""
    keep_deliveries_days: float = Field(default=7.0, gt=0)
    """Days for which ended deliveries are listed."""

    max_upload_bytes: int = Field(default=1 << 40, gt=0)
    """Most bytes of one upload."""
    max_uploads_bytes: int = Field(default=1 << 42, gt=0)
    """Most bytes of all uploads together, on the first storage root."""
    abandoned_upload_s: float = Field(default=86_400.0, gt=0)
    """Time without a new part after which an incomplete upload is removed."""

    ray_dashboard_url: str = "http://127.0.0.1:8265"
    ray_token_path: Path | None = None
    """File with the token of a Ray cluster that uses token authentication."""
    launcher: Literal["ray_jobs", "kuberay"] = "ray_jobs"
    """Default for jobs without `resources.cluster`: the standing Ray cluster at `ray_dashboard_url`, or a RayCluster
    for each job."""
    kuberay: KubeRaySettings = KubeRaySettings()
    driver_python: str = sys.executable
    """Python that runs drivers on the cluster."""
    events_url: str = ""
    """URL at which drivers and workers reach this service; by default `http://host:port`."""

    keep_jobs_days: float | None = Field(default=None, gt=0)
    """Days after a job's end for which its event stream is complete; None: forever. Later, log lines and states are
    deleted; metrics, checkpoints and files stay until the job is deleted."""

    abandoned_after_s: float = Field(default=86_400.0, gt=0)
    """Longest time to copy the checkpoint that a new job starts from; older copies, of killed control planes, are
    removed."""

    controller_interval_s: float = Field(default=0.5, gt=0)
    lease_s: float = Field(default=5.0, gt=0)
    """Time after which another control plane on the same database replaces a dead one."""
    cancel_deadline_s: float = Field(default=30.0, gt=0)
    """Longest time for a run to obey a cancel before its driver is killed."""
    pause_deadline_s: float = Field(default=600.0, gt=0)
    """Longest time for a run to commit a checkpoint and pause before its driver is killed."""
    lost_grace_s: float = Field(default=10.0, gt=0)
    """Time for which a driver must be unknown to the cluster before it counts as lost."""
    grow_after_s: float = Field(default=30.0, gt=0)
    """Running time of a worker group before it may be restarted with more workers."""
    ping_interval_s: float = Field(default=5.0, gt=0)
    """Interval of comments on idle streams, which detect dead clients, and of polling the store for others' writes."""
    shutdown_s: float = Field(default=5.0, gt=0)
    """Longest time for open requests to finish after SIGTERM."""

    max_connections: int = Field(default=4096, ge=1)
    """Most authenticated connections, including streams and workers, from all addresses together."""
    max_unauthenticated: int = Field(default=1024, ge=1)
    """Most unauthenticated connections; beyond that, the oldest without a pending response is closed."""
    max_unauthenticated_per_address: int = Field(default=256, ge=1)
    """Most unauthenticated connections of one address (for IPv6: one /64 network)."""
    header_timeout_s: float = Field(default=10.0, gt=0)
    """Longest time to receive headers, from their first byte or a new connection."""
    body_timeout_s: float = Field(default=20.0, gt=0)
    """Longest time to receive a body, plus the time of the received bytes at `min_body_bytes_per_s`."""
    min_body_bytes_per_s: float = Field(default=500.0, gt=0)
    """Rate at which a body of any length is received without a timeout."""
    write_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time without progress in sending a response."""
    keep_alive_s: int = Field(default=15, ge=1)
    """Longest idle time between requests. Longer than clients' (httpx: 5 s), so that none uses a connection being
    closed."""

    @field_validator("state_dir", "cache_dir", "tracking_dir", mode="before")
    @classmethod
    def _local(cls, path: object) -> object:
        if "://" in str(path):
            raise ValueError("must be a local folder (files in it are memory-mapped or locked), not a URL")
        return path

    @field_validator("state_dir", "cache_dir", "tracking_dir", "ray_token_path")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        # An empty path is "left out", filled in below.
        return _expand_home(path) if path is not None and path != Path() else path

    @field_validator("webhook_networks")
    @classmethod
    def _are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"must contain networks like 10.0.0.0/8, but {error}") from None
        return networks

    @field_validator("allowed_code")
    @classmethod
    def _exact_functions(cls, functions: tuple[str, ...]) -> tuple[str, ...]:
        for function in functions:
            if not is_code(function):
                raise ValueError(f"must contain only module:function, but {function!r} is not; {CODE_REMEDY}")
        return functions

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: dict[str, object]) -> dict[str, object]:
        state_dir = _expand_home(Path(str(values.get("state_dir") or cls.model_fields["state_dir"].default)))
        fields = dict(values)
        if not fields.get("database_url"):
            fields["database_url"] = f"sqlite:///{state_dir / 'shardyard.db'}"
        if not fields.get("storage_roots"):
            fields["storage_roots"] = (str(state_dir / "storage"),)
        if not fields.get("cache_dir"):
            fields["cache_dir"] = state_dir / "cache"
        if not fields.get("tracking_dir"):
            fields["tracking_dir"] = state_dir / "tracking"
        tracking_dir = Path(str(fields["tracking_dir"]))
        database = f"sqlite:///{_expand_home(tracking_dir) / 'mlflow.db'}"
        # The trackers' own variables, which their users have set anyway.
        if not fields.get("mlflow_tracking_uri"):
            fields["mlflow_tracking_uri"] = os.environ.get("MLFLOW_TRACKING_URI") or database
        fields.setdefault("wandb_base_url", os.environ.get("WANDB_BASE_URL", ""))
        fields.setdefault("has_wandb_key", bool(os.environ.get("WANDB_API_KEY")))
        if not fields.get("events_url"):
            host = str(fields.get("host") or cls.model_fields["host"].default)
            # Servers listen on a wildcard address; clients cannot connect to it.
            reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            url_host = f"[{reachable}]" if ":" in reachable else reachable
            fields["events_url"] = f"http://{url_host}:{fields.get('port') or cls.model_fields['port'].default}"
        return fields

    @model_validator(mode="after")
    def _safe(self) -> "Settings":
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host (={self.host!r}) is reachable from other machines and requires a token; set "
                "SHARDYARD_TOKEN, or listen on 127.0.0.1"
            )
        if self.token is not None and len(self.token.get_secret_value()) < 16:
            raise ValueError("token must have at least 16 characters; create one with 'openssl rand -hex 32'")
        if self.token is not None and not _fits_header(self.token.get_secret_value()):
            raise ValueError(
                "token must be printable ASCII without surrounding spaces; create one with 'openssl rand -hex 32'"
            )
        names = [webhook.name for webhook in self.webhooks]
        for webhook in self.webhooks:
            if names.count(webhook.name) > 1:
                raise ValueError(f"webhooks names {webhook.name!r} twice; rename one")
            if webhook.secret is None and webhook.format == "json":
                raise ValueError(
                    f"webhooks: {webhook.name!r} requires a secret, by which its receiver verifies; create one with "
                    "'echo whsec_$(openssl rand -base64 32)'"
                )
        for url in (*self.tracking_urls, *([self.wandb_base_url] if self.wandb_base_url else [])):
            if urlsplit(url).scheme not in ("http", "https"):
                raise ValueError(f"tracking_urls and wandb_base_url (={url!r}) must be http or https URLs")
        if not self.mlflow_tracking_uri.startswith(("http://", "https://", "sqlite:///", "postgresql", "mysql")):
            raise ValueError(
                "mlflow_tracking_uri (from SHARDYARD_MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_URI) must be an http or "
                "https URL, or that of a database (sqlite:///, postgresql://, mysql://): MLflow no longer keeps runs "
                "in files"
            )
        if self.launcher == "kuberay":
            for name in ("image", "pools"):
                if not getattr(self.kuberay, name):
                    raise ValueError(f"kuberay.{name} is required by launcher (='kuberay'); set "
                                     f"SHARDYARD_KUBERAY_{name.upper()}")  # fmt: skip
        if self.kuberay.warm_nodes and "ray_dashboard_url" not in self.model_fields_set:
            raise ValueError(
                f"kuberay.warm_nodes (={self.kuberay.warm_nodes}) requires ray_dashboard_url, where jobs reach them; "
                f"set SHARDYARD_RAY_DASHBOARD_URL to http://{self.kuberay.shared_cluster}-head-svc:8265"
            )
        if urlsplit(self.events_url).scheme not in ("http", "https"):
            raise ValueError(f"events_url (={self.events_url!r}) must be an http or https URL")
        return self


def _expand_home(path: Path) -> Path:
    try:
        return expand_home(path).absolute()
    except FileNotFoundError as error:
        raise ValueError(f"the folder {error.filename}: {error.strerror}; set SHARDYARD_STATE_DIR to another") from None


def _fits_header(token: str) -> bool:
    return token.isascii() and token.isprintable() and token == token.strip()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
