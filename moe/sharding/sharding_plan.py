"""Plans for modules: where every tensor lies, how every operator runs, what it is predicted to cost."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe.plan.cluster.cluster import Cluster, one_cluster_of
from moe.sharding.hints.hints import Hint, of_plain, to_plain
from moe.sharding.plan_records import Collective, Memory, PricedLayout, StoredTensor
from moe.spec import Problem, SpecError

VERSION = 1


@dataclass(frozen=True, eq=False)
class ShardingPlan:
    """A plan for one module, one shape of batch and one mesh. All of it is plain data."""

    mesh: dict[str, int]
    """Ranks along each axis, outermost first."""
    digest: str
    """Hash of the captured graph: another module, or another batch, has another."""
    sample: list[Any]
    """Shapes and dtypes of the batch's tensors, other values as they are; None where it holds what is no plain data."""
    parameters: dict[str, str]
    """Placements by name, of buffers too: `S(0) R`, one a mesh axis."""
    options: dict[str, list[str]]
    """Of each operator, one a mesh axis; before them that along the loop over micro-batches, where there is one."""
    kept: list[tuple[str, str]]
    hints: dict[str, Hint]
    cluster: Cluster
    step_s: float
    relaxed_s: float
    """Bound of the integer program's relaxation."""
    memory: Memory
    collectives: tuple[Collective, ...]
    stored: tuple[StoredTensor, ...] = ()
    """Parameters and buffers, in the order in which they are used."""
    annotated: dict[str, str] = field(default_factory=dict)
    """Placements of annotated tensors, by where they were annotated."""
    considered: tuple[PricedLayout, ...] = ()
    conflicts: tuple[str, ...] = ()
    """Operators that two hints want split differently, in words."""
    micro_batches: int = 1
    """Parts of the batch that a step computes one after the other, adding up gradients."""
    recompute: bool = False
    """Whether blocks are computed again in the backward pass, so that what is inside them is not kept until then."""

    devices: tuple[int, ...] = ()
    """Rank at each place of the mesh, whose last axis runs fastest; empty where they are in the order of their
    numbers."""

    layout: str = ""
    """`data parallel`, `fully sharded`, `searched` or `from hints`."""

    loss: str | None = None
    """Name of the function that makes the loss of what the module returns; None where the module returns its loss."""

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(self.mesh.values())

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "version": VERSION,
            "mesh": _pairs(self.mesh),
            "hints": {name: to_plain(hint) for name, hint in self.hints.items()},
            "cluster": self.cluster.model_dump(mode="json", exclude_none=True),
            "memory": asdict(self.memory),
            "collectives": [asdict(collective) for collective in self.collectives],
            "stored": [asdict(entry) for entry in self.stored],
            "considered": [
                asdict(candidate) | {"mesh": _pairs(candidate.mesh)} for candidate in self.considered
            ],
            "conflicts": list(self.conflicts),
            "devices": list(self.devices),
            "kept": [list(entry) for entry in self.kept],
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "ShardingPlan":
        """Raises SpecError for what is no plan of this release."""
        if not isinstance(given, Mapping):
            rule = "is no plan, which is an object in JSON"
            raise SpecError(Problem("corrupt", "plan", type(given).__name__, rule, "plan again"))
        plain = dict(given)
        if (version := plain.pop("version", None)) != VERSION:
            raise SpecError(
                Problem("wrong_version", "plan.version", version, f"must be {VERSION}", "plan again")
            )
        try:
            return cls(
                **{
                    **plain,
                    "mesh": dict(plain["mesh"]),
                    "hints": {name: of_plain(hint) for name, hint in plain["hints"].items()},
                    "cluster": one_cluster_of(plain["cluster"]),
                    "memory": Memory(**plain["memory"]),
                    "collectives": tuple(Collective(**fields) for fields in plain["collectives"]),
                    "stored": tuple(StoredTensor(**fields) for fields in plain["stored"]),
                    "considered": tuple(
                        PricedLayout(**fields | {"mesh": dict(fields["mesh"])})
                        for fields in plain["considered"]
                    ),
                    "conflicts": tuple(plain["conflicts"]),
                    "devices": tuple(plain.get("devices", ())),
                    "kept": [(name, placements) for name, placements in plain["kept"]],
                }
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SpecError(Problem("corrupt", "plan", None, f"is no plan ({error})", "plan again")) from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "ShardingPlan":
        """Raises SpecError for what is no plan, and where it cannot be read."""
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except OSError as error:
            raise SpecError(
                Problem(
                    "unreadable",
                    str(path),
                    None,
                    f"is a plan's file that cannot be read ({error.strerror})",
                    "give the path that plan.save was given",
                )
            ) from None
        except UnicodeDecodeError as error:
            raise SpecError(
                Problem("invalid_encoding", str(path), None, f"is no UTF-8 ({error.reason})", "plan again")
            ) from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise SpecError(
                Problem("invalid_syntax", str(path), None, f"is no JSON ({error})", "plan again")
            ) from None

    def explain(self) -> str:
        """The plan for a person."""
        from moe.sharding.explain.explain import explain_plan

        return explain_plan(self)

    def draw(self, path: str | Path) -> None:
        """Write a picture of it, as SVG."""
        from moe.sharding.explain.draw import draw_svg

        Path(path).write_text(draw_svg(self))


def _pairs(mesh: Mapping[str, int]) -> list[list[Any]]:
    """A mesh as JSON has it: the order of axes counts, and not every store keeps that of keys."""
    return [list(pair) for pair in mesh.items()]
