"""Plans for modules: the placement of each tensor, the options of each operator, and the predicted costs."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe.plan.cluster.cluster import Cluster, parse_cluster
from moe.sharding.hints.hints import Hint, hint_from_plain, hint_to_plain
from moe.sharding.plan_records import Collective, Memory, PricedLayout, StoredTensor
from moe.spec import spec_error

VERSION = 1


@dataclass(frozen=True, eq=False)
class ShardingPlan:
    """A plan for one module, one shape of batch and one mesh, as plain data."""

    mesh: dict[str, int]
    """Ranks along each axis, outermost first."""
    digest: str
    """Hash of the captured graph, which differs for another module or batch."""
    sample: list[Any]
    """Description of the batch (`moe.sharding.sample`): shapes and dtypes of tensors, and other values."""
    parameters: dict[str, str]
    """Placements of parameters and buffers by name, one for each mesh axis: `S(0) R`."""
    options: dict[str, list[str]]
    """Options of each operator, one for each mesh axis, after that along the loop over micro-batches, if there is
    one."""
    kept: list[tuple[str, str]]
    hints: dict[str, Hint]
    cluster: Cluster
    step_s: float
    relaxed_s: float
    """Lower bound of `step_s` from the linear relaxation of the integer program."""
    memory: Memory
    collectives: tuple[Collective, ...]
    stored: tuple[StoredTensor, ...] = ()
    """Parameters and buffers, in the order in which they are used."""
    annotated: dict[str, str] = field(default_factory=dict)
    """Placements of annotated tensors, by the line of the annotation."""
    considered: tuple[PricedLayout, ...] = ()
    conflicts: tuple[str, ...] = ()
    """Descriptions of operators for which two hints require different splits."""
    micro_batches: int = 1
    """Number of parts of the batch, which a step computes one after the other, accumulating gradients."""
    recompute: bool = False
    """Whether blocks are recomputed in the backward pass instead of saving their activations."""

    devices: tuple[int, ...] = ()
    """Rank at each place of the mesh, last axis fastest; empty if the ranks are in ascending order."""

    layout: str = ""
    """`data parallel`, `fully sharded`, `searched` or `from hints`."""

    loss: str | None = None
    """Name of the function that computes the loss from the module's result; None if the module returns its loss."""

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
            "hints": {name: hint_to_plain(hint) for name, hint in self.hints.items()},
            "cluster": self.cluster.model_dump(mode="json", exclude_none=True),
            "memory": asdict(self.memory),
            "collectives": [asdict(collective) for collective in self.collectives],
            "stored": [asdict(entry) for entry in self.stored],
            "considered": [asdict(candidate) | {"mesh": _pairs(candidate.mesh)} for candidate in self.considered],
            "conflicts": list(self.conflicts),
            "devices": list(self.devices),
            "kept": [list(entry) for entry in self.kept],
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "ShardingPlan":
        """The plan from JSON data. Raises SpecError for data that is not a plan of this release."""
        if not isinstance(given, Mapping):
            rule = "is not a plan: it must be a JSON object"
            raise spec_error("corrupt", "plan", type(given).__name__, rule, "plan again")
        plain = dict(given)
        if (version := plain.pop("version", None)) != VERSION:
            raise spec_error("wrong_version", "plan.version", version, f"must be {VERSION}", "plan again")
        try:
            return cls(
                **{
                    **plain,
                    "mesh": dict(plain["mesh"]),
                    "hints": {name: hint_from_plain(hint) for name, hint in plain["hints"].items()},
                    "cluster": parse_cluster(plain["cluster"]),
                    "memory": Memory(**plain["memory"]),
                    "collectives": tuple(Collective(**fields) for fields in plain["collectives"]),
                    "stored": tuple(StoredTensor(**fields) for fields in plain["stored"]),
                    "considered": tuple(
                        PricedLayout(**fields | {"mesh": dict(fields["mesh"])}) for fields in plain["considered"]
                    ),
                    "conflicts": tuple(plain["conflicts"]),
                    "devices": tuple(plain.get("devices", ())),
                    "kept": [(name, placements) for name, placements in plain["kept"]],
                }
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise spec_error("corrupt", "plan", None, f"is not a valid plan ({error})", "plan again") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "ShardingPlan":
        """The plan of a file. Raises SpecError for a file that is not a plan or cannot be read."""
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except OSError as error:
            rule, remedy = f"cannot be read ({error.strerror})", "use the path passed to plan.save"
            raise spec_error("unreadable", str(path), None, rule, remedy) from None
        except UnicodeDecodeError as error:
            raise spec_error(
                "invalid_encoding", str(path), None, f"is not UTF-8 ({error.reason})", "plan again"
            ) from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise spec_error("invalid_syntax", str(path), None, f"is not JSON ({error})", "plan again") from None

    def explain(self) -> str:
        """Description of the plan for people."""
        from moe.sharding.explain.explain import explain_plan

        return explain_plan(self)

    def draw(self, path: str | Path) -> None:
        """Write a picture of the plan as SVG. Raises SpecError if matplotlib is not installed."""
        from moe.sharding.explain.draw import draw_svg

        Path(path).write_text(draw_svg(self))


def _pairs(mesh: Mapping[str, int]) -> list[list[Any]]:
    """A mesh as a list of pairs for JSON: the order of axes matters, and not every store keeps the order of keys."""
    return [list(pair) for pair in mesh.items()]
