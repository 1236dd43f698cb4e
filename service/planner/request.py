"""Messages to and from a process that plans a user's module."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from moe.plan import Cluster
from moe.spec import JobSpec


class _PlannerMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModuleRequest(_PlannerMessage):
    """A module of the command line, by its functions."""

    build: str
    """`module:function` that builds the module."""
    sample: str
    """`module:function` that returns one batch."""
    cluster: Cluster
    hints: dict[str, Any] = {}
    picture: bool = False


class JobRequest(_PlannerMessage):
    """A job of a user's module, with the allowed functions."""

    spec: JobSpec
    cluster: Cluster
    allowed_code: tuple[str, ...]


class Request(_PlannerMessage):
    """Content of the process's standard input."""

    job: JobRequest | None = None
    module: ModuleRequest | None = None
    memory_bytes: int | None = None
    """Limit of its data memory; unlimited if None."""
    timeout_s: float | None = None
    parent_pid: int
    """Process whose death kills this one."""


class PlannerAnswer(_PlannerMessage):
    """Answer of the process, one line on its descriptor."""

    problems: tuple[dict[str, Any], ...] = ()
    plan: dict[str, Any] | None = None
    """A `moe.plan.Plan` for a job, or the plan of `moe.sharding` for a module."""
    explained: str = ""
    picture: str = ""
