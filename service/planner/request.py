"""Messages to a process that plans a user's module, and back."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from moe.plan import Cluster
from moe.spec import JobSpec


class _PlannerMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModuleRequest(_PlannerMessage):
    """A module by its functions, from the command line."""

    build: str
    """`module:function`, which makes it."""
    sample: str
    """Likewise, which gives one batch."""
    cluster: Cluster
    hints: dict[str, Any] = {}
    picture: bool = False


class JobRequest(_PlannerMessage):
    """A job of a module, of which the service allows these functions."""

    spec: JobSpec
    cluster: Cluster
    allowed_code: tuple[str, ...]


class Request(_PlannerMessage):
    """Content of the process's standard input."""

    job: JobRequest | None = None
    module: ModuleRequest | None = None
    memory_bytes: int | None = None
    """Memory that it may have for its data; any when left out."""
    timeout_s: float | None = None
    parent_pid: int
    """Process whose end ends this one."""


class PlannerAnswer(_PlannerMessage):
    """Answer of the process, one line on its descriptor."""

    problems: tuple[dict[str, Any], ...] = ()
    plan: dict[str, Any] | None = None
    """Plan: a `moe.plan.Plan` of a job, or the plan of `moe.sharding`."""
    explained: str = ""
    picture: str = ""
