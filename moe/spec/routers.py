"""Which fields of a MoESpec belong to which router, and where a router's default is its own."""

from collections.abc import Mapping
from typing import Any, Literal

RouterName = Literal[
    "gshard_top2", "switch_top1", "softmax_topk", "sigmoid_topk", "sinkhorn_topk", "expert_choice"
]

_CAPACITY = frozenset({"capacity_factor", "min_capacity"})
_BALANCE = frozenset({"aux_coefficient", "aux_scope"})

FIELDS: Mapping[str, frozenset[str]] = {
    "gshard_top2": _CAPACITY
    | {
        "aux_coefficient", "aux_form", "capacity_rule", "normalize_gates", "rejected_second_takes_slot",
        "second_expert", "second_expert_threshold",
    },
    "switch_top1": _CAPACITY | _BALANCE | {"drop_by"},
    "softmax_topk": _CAPACITY | _BALANCE | {"drop_by", "renormalize_gates", "softmax", "top_k"},
    "sigmoid_topk": _CAPACITY
    | _BALANCE
    | {
        "bias_update_rate", "drop_by", "expert_groups_per_token", "num_expert_groups", "renormalize_gates",
        "routed_scaling_factor", "top_k",
    },
    "sinkhorn_topk": _CAPACITY | {"drop_by", "sinkhorn_iterations", "top_k"},
    "expert_choice": frozenset({"capacity_factor", "later_tokens_choose_too"}),
}  # fmt: skip
"""The fields that only some routers have; every other field of MoESpec is every router's."""

OWN_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gshard_top2": {},
    "switch_top1": {"capacity_factor": 1.25, "min_capacity": 1},
    "softmax_topk": {"capacity_factor": None, "min_capacity": 1},
    "sigmoid_topk": {"capacity_factor": None, "min_capacity": 1, "aux_coefficient": 0.0},
    "sinkhorn_topk": {"capacity_factor": None, "min_capacity": 1, "aux_coefficient": 0.0},
    "expert_choice": {"aux_coefficient": 0.0},
}

_SOME_ROUTERS = frozenset().union(*FIELDS.values())


def foreign_fields(router: str) -> frozenset[str]:
    """The fields that belong to other routers only."""
    return _SOME_ROUTERS - FIELDS[router]


def owners(field: str) -> list[str]:
    """The routers that have a field."""
    return [router for router, fields in FIELDS.items() if field in fields]


def for_router(router: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a preset's layer without those that its own router needed, where another one is asked for."""
    if router in (None, given.get("router", "gshard_top2")):
        return dict(given)
    return {name: value for name, value in given.items() if name != "router" and name not in _SOME_ROUTERS}
