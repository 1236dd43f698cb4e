"""Cluster of several pools, each of one kind of nodes."""

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_serializer, model_validator

from moe.plan.cluster.cluster import Cluster, parse_cluster, under_cluster_path
from moe.spec.base import Spec, Text
from moe.spec.errors import Problem, SpecError, spec_error
from moe.spec.files import read_plain
from moe.spec.problems import problems_of

MAX_POOLS = 16


class Pool(Spec):
    """Named nodes of one kind; written as a `Cluster` with a `name`."""

    name: Text = Field(min_length=1, max_length=100)
    cluster: Cluster

    @model_validator(mode="before")
    @classmethod
    def _parse_flat_form(cls, fields: Any) -> Any:
        """Accept `{name, num_nodes, ...}`, the form in files."""
        if not isinstance(fields, dict) or isinstance(fields.get("cluster"), Cluster):
            return fields
        facts = {key: value for key, value in fields.items() if key != "name"}
        name_field = {"name": fields["name"]} if "name" in fields else {}
        try:
            return {**name_field, "cluster": Cluster.model_validate(facts)}
        except ValidationError as error:
            raise SpecError(problems_of(error)) from None

    @model_serializer(mode="plain")
    def _serialize_flat_form(self) -> dict[str, Any]:
        return {"name": self.name, **self.cluster.model_dump(mode="json")}


class Pools(Spec):
    """Pools of a cluster. A job is on one of them."""

    pools: tuple[Pool, ...] = Field(max_length=MAX_POOLS)

    @model_validator(mode="after")
    def _check_distinct_names(self) -> "Pools":
        names = [pool.name for pool in self.pools]
        if not names:
            raise spec_error(
                "empty", "pools", None, "must have at least one pool", "add it, or describe one kind of nodes"
            )
        if problems := [
            Problem(
                "duplicate", f"pools[{index}].name", name, "is also the name of another pool", "use different names"
            )
            for index, name in enumerate(names)
            if name in names[:index]
        ]:
            raise SpecError(problems)
        return self

    def cluster(self, name: str) -> Cluster:
        """Cluster of the pool with this name."""
        return next(pool.cluster for pool in self.pools if pool.name == name)


def read_cluster(path: str | Path) -> Cluster | Pools:
    """Read a YAML or JSON file. Raises SpecError if it is invalid, OSError if it cannot be read."""
    return cluster_of(read_plain(path))


def cluster_of(fields: Any) -> Cluster | Pools:
    """Parse a cluster, or pools. Raises SpecError with every problem."""
    if not isinstance(fields, dict) or "pools" not in fields:
        return parse_cluster(fields)
    if flat := [key for key in fields if key in Cluster.model_fields]:
        raise SpecError(
            Problem("conflict", f"cluster.{key}", None if isinstance(fields[key], dict | list) else fields[key],
                    "applies to one kind of nodes, but there are pools", "move it into the pools it applies to")
            for key in flat
        )  # fmt: skip
    if "between" in fields:
        raise spec_error("unsupported", "cluster.between", None, "links pools, but a job runs in one pool",
                    "omit it")  # fmt: skip
    try:
        return Pools.model_validate(fields)
    except ValidationError as error:
        raise SpecError(under_cluster_path(problems_of(error))) from None
