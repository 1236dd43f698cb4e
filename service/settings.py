"""Settings of this control plane: read once, from `SHARDYARD_*` in the environment or from arguments."""

import ipaddress
import sys
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from moe.spec.module import CODE_REMEDY, is_code
from moe.storage.home import expand_home


class Settings(BaseSettings):
    """Everything that an operator decides. Raises pydantic's ValidationError for what is unsafe."""

    model_config = SettingsConfigDict(
        env_prefix="SHARDYARD_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # the input holds the token
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8321, ge=0, le=65535)
    token: SecretStr | None = None
    """Token that every request must bear; needed to listen on anything but loopback."""
    allowed_hosts: tuple[str, ...] = ()
    """Names (without port) under which clients reach this service, beside loopback's and `host`."""
    owner: str = "local"
    """Whose the jobs are that are posted here."""

    state_dir: Path = Path("~/.shardyard")
    """Holds the database, and by default storage and caches; readable by its owner only."""
    database_url: str = ""
    """An SQLAlchemy URL; SQLite in `state_dir` when left out."""
    storage_roots: tuple[str, ...] = ()
    """fsspec URLs or paths under which jobs may keep what they make; `state_dir/storage` when left out.
    The first is where jobs go that name none."""
    data_roots: tuple[str, ...] = ()
    """fsspec URLs or paths under which corpora may lie; none means only the `catalogs` corpus."""
    cache_dir: Path = Path()
    """Prepared corpora; `state_dir/cache` when left out."""

    prepare_catalogs: bool = True
    """Whether `shardyard up` prepares the corpus of the built-in catalogs while its Ray starts, for a first job."""

    allowed_code: tuple[str, ...] = ()
    """Functions of users' modules that jobs may name, each exactly as `module:function`; none when left out. They are
    imported by jobs' processes and by those that plan jobs, with all rights of these, and never by this service. Both
    find them installed, or by PYTHONPATH."""
    planning_timeout_s: float = Field(default=120.0, gt=0)
    """Longest that planning one job of a user's module may take."""
    planning_memory_bytes: int = Field(default=8 * 1024**3, gt=0)
    """Memory that a process which plans one may have for its data."""

    generation_max_tokens: int = Field(default=4096, ge=1)
    """Most tokens that one request to generate may ask for."""
    generation_timeout_s: float = Field(default=120.0, gt=0)
    """Longest that making one text may take."""
    generation_load_timeout_s: float = Field(default=300.0, gt=0)
    """Longest that loading a model may take."""
    generation_memory_bytes: int | None = Field(default=None, gt=0)
    """Memory that the process which generates may have for its data, the model's weights among it; any when left
    out."""
    generation_idle_s: float = Field(default=300.0, gt=0)
    """Time after the last text for which a model stays loaded."""

    ray_dashboard_url: str = "http://127.0.0.1:8265"
    ray_token_path: Path | None = None
    """File with the token of a Ray cluster whose token authentication is on."""
    driver_python: str = sys.executable
    """The Python that runs drivers on the cluster."""
    events_url: str = ""
    """This service as drivers and workers reach it; `http://host:port` when left out."""

    keep_jobs_days: float | None = Field(default=None, gt=0)
    """Days after a job's end that its stream still reaches back to its beginning; for ever when left out. Then its
    log lines and states go from the database. Its metrics, checkpoints and files stay until the job is deleted."""

    abandoned_after_s: float = Field(default=86_400.0, gt=0)
    """Longest that copying the checkpoint that a new job starts from may take; what is left of a copy whose control
    plane was killed is removed then."""

    controller_interval_s: float = Field(default=0.5, gt=0)
    lease_s: float = Field(default=5.0, gt=0)
    """Time for which a control plane that died keeps another on the same database from acting."""
    cancel_deadline_s: float = Field(default=30.0, gt=0)
    """Longest that a run may take to obey a cancel before its driver is stopped by force."""
    pause_deadline_s: float = Field(default=600.0, gt=0)
    """Longest that a run may take to commit a checkpoint and pause before its driver is stopped by force."""
    lost_grace_s: float = Field(default=10.0, gt=0)
    """Time for which the cluster must say that it knows nothing of a driver before the driver counts as lost."""
    grow_after_s: float = Field(default=30.0, gt=0)
    """Time that a worker group has to run before it is made anew because the cluster has room for more workers."""
    ping_interval_s: float = Field(default=5.0, gt=0)
    """Between comments on an idle stream, by which dead clients are noticed, and between looks at the store for
    what another process wrote."""
    shutdown_s: float = Field(default=5.0, gt=0)
    """Longest that open requests may take to end at SIGTERM."""

    max_connections: int = Field(default=4096, ge=1)
    """Connections that have authenticated, streams and workers' among them, however many come from one address."""
    max_unauthenticated: int = Field(default=1024, ge=1)
    """Connections that have not: beyond it the oldest that is owed no answer gives way."""
    max_unauthenticated_per_address: int = Field(default=256, ge=1)
    """As above, of one address (of IPv6: one network of 64 bits)."""
    header_timeout_s: float = Field(default=10.0, gt=0)
    """Longest that a request's headers may take to come, from its first byte or from a new connection."""
    body_timeout_s: float = Field(default=20.0, gt=0)
    """Longest that a request's body may take to come, beside what its length earns it."""
    min_body_bytes_per_s: float = Field(default=500.0, gt=0)
    """A body that comes at this pace may take as long as it is."""
    write_timeout_s: float = Field(default=60.0, gt=0)
    """Longest that a client may take nothing of an answer that is on its way."""
    keep_alive_s: int = Field(default=15, ge=1)
    """Longest that a connection may lie idle between requests. Longer than clients keep theirs (httpx: 5 s), so that
    none sends a request into one that is being closed."""

    @field_validator("state_dir", "cache_dir", "ray_token_path")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        # An empty path is "left out", filled in below.
        return _at_home(path) if path is not None and path != Path() else path

    @field_validator("allowed_code")
    @classmethod
    def _exact_functions(cls, functions: tuple[str, ...]) -> tuple[str, ...]:
        for function in functions:
            if not is_code(function):
                raise ValueError(f"must hold module:function alone, and {function!r} is none; {CODE_REMEDY}")
        return functions

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: dict[str, object]) -> dict[str, object]:
        state_dir = _at_home(Path(str(values.get("state_dir") or cls.model_fields["state_dir"].default)))
        fields = dict(values)
        if not fields.get("database_url"):
            fields["database_url"] = f"sqlite:///{state_dir / 'shardyard.db'}"
        if not fields.get("storage_roots"):
            fields["storage_roots"] = (str(state_dir / "storage"),)
        if not fields.get("cache_dir"):
            fields["cache_dir"] = state_dir / "cache"
        if not fields.get("events_url"):
            host = str(fields.get("host") or cls.model_fields["host"].default)
            # A wildcard is an address to listen on, not one to connect to.
            reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            url_host = f"[{reachable}]" if ":" in reachable else reachable
            fields["events_url"] = (
                f"http://{url_host}:{fields.get('port') or cls.model_fields['port'].default}"
            )
        return fields

    @model_validator(mode="after")
    def _safe(self) -> "Settings":
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host (={self.host!r}) is reachable from other machines, and needs a token; "
                "set SHARDYARD_TOKEN, or listen on 127.0.0.1"
            )
        if self.token is not None and len(self.token.get_secret_value()) < 16:
            raise ValueError("token must have at least 16 characters; make one with 'openssl rand -hex 32'")
        if self.token is not None and not _fits_header(self.token.get_secret_value()):
            raise ValueError(
                "token must be printable ASCII without spaces around it, as headers are; "
                "make one with 'openssl rand -hex 32'"
            )
        if urlsplit(self.events_url).scheme not in ("http", "https"):
            raise ValueError(f"events_url (={self.events_url!r}) must be an http or https URL")
        return self


def _at_home(path: Path) -> Path:
    try:
        return expand_home(path).absolute()
    except FileNotFoundError as error:
        raise ValueError(
            f"the folder {error.filename}: {error.strerror}; SHARDYARD_STATE_DIR says where state is kept"
        ) from None


def _fits_header(token: str) -> bool:
    return token.isascii() and token.isprintable() and token == token.strip()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
