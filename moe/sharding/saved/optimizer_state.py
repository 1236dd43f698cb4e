"""State of an optimizer, by the module's names of parameters."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moe.sharding.applied.applied import Applied
from moe.sharding.applied.dtensors import local
from moe.sharding.saved.index import OPTIMIZER, Index, OptimizerState, SavedTensor
from moe.spec import Problem, SpecError

_NAMES = ("params", "param_names")
"""Keys of a parameter group that are replaced by the module's names."""


def plain_state(
    applied: Applied, optimizer: Optimizer, add: Callable[[str, str | None, Tensor], None]
) -> OptimizerState:
    """Its state, having called `add(name, parameter, tensor)` for each tensor in it: of a parameter that it lies as,
    or whole on all ranks. Raises SpecError for what cannot be saved."""
    numbers, state_dict = _numbers(applied, optimizer), optimizer.state_dict()
    state: dict[str, dict[str, dict[str, Any]]] = {}
    problems: list[Problem] = []
    for name, number in numbers.items():
        parameter: Any = applied.get_parameter(name)
        slots = state[name] = {}
        for slot, value in state_dict["state"].get(number, {}).items():
            path = f"{OPTIMIZER}{slot}.{name}"
            if isinstance(value, Tensor):
                lies_alike = value.dim() > 0 and value.shape == parameter.shape
                if (
                    not lies_alike
                    and isinstance(value, DTensor)
                    and any(placement.is_shard() for placement in value.placements)
                ):
                    rule = f"is sharded but does not have its parameter's shape (={list(parameter.shape)})"
                    remedy = "save applied.state_dict() and this state with torch.distributed.checkpoint"
                    problems.append(Problem("shape_mismatch", path, list(value.shape), rule, remedy))
                add(path, name if lies_alike else None, local(value))
                slots[slot] = {"tensor": path}
                continue
            try:
                slots[slot] = {"plain": _plain(value)}
            except TypeError:
                rule, remedy = "cannot be saved", "use an optimizer whose state is tensors and numbers"
                problems.append(Problem("wrong_type", path, type(value).__name__, rule, remedy))
    by_number = {number: name for name, number in numbers.items()}
    groups = []
    for position, group in enumerate(state_dict["param_groups"]):
        options = {}
        for key, value in group.items():
            if key in _NAMES:
                continue
            try:
                options[key] = _plain(value)
            except TypeError:
                rule, remedy = "cannot be saved", "use a plain value"
                problems.append(Problem("wrong_type", f"optimizer.param_groups[{position}].{key}", type(value).__name__,
                                        rule, remedy))  # fmt: skip
        groups.append({"names": [by_number[number] for number in group["params"]], "options": options})
    if problems:
        raise SpecError(problems)
    return OptimizerState(type(optimizer).__name__, tuple(groups), state)


def optimizer_problems(applied: Applied, optimizer: Optimizer, index: Index) -> Iterator[Problem]:
    """Problems of a checkpoint whose state is not of this optimizer."""
    saved_state, kind = index.optimizer, type(optimizer).__name__
    remedy = "build the optimizer as when the checkpoint was saved"
    if saved_state is None:
        yield Problem("missing", "optimizer", kind, "has no state in the checkpoint", "load without the optimizer")
        return
    if saved_state.kind != kind:
        yield Problem(
            "mismatch", "optimizer", kind, f"must be the saved optimizer's class (={saved_state.kind})", remedy
        )
    names = _names_by_group(applied, optimizer)
    if len(names) != len(saved_state.groups):
        rule = f"must be the number of saved groups (={len(saved_state.groups)})"
        yield Problem("mismatch", "optimizer.param_groups", len(names), rule, remedy)
        return
    for position, (group_names, saved_group) in enumerate(zip(names, saved_state.groups, strict=True)):
        saved_names = {index.tied.get(name, name) for name in saved_group["names"]}
        current_names = {index.tied.get(name, name) for name in group_names}
        for rule, differing in (
            ("is not in the saved group", current_names - saved_names),
            ("is missing", saved_names - current_names),
        ):
            for name in sorted(differing):
                yield Problem("mismatch", f"optimizer.param_groups[{position}]", name, rule, remedy)


def restore(
    applied: Applied, optimizer: Optimizer, index: Index, read: Callable[[SavedTensor, str, str | None], Tensor]
) -> None:
    """Load a checkpoint's state into an optimizer. `read(saved_tensor, name, parameter)` returns a tensor: this rank's
    part if it is sharded as `parameter` is, the full tensor if `parameter` is None."""
    assert index.optimizer is not None
    numbers, state_dict = _numbers(applied, optimizer), optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    shards = applied.shards()
    elementwise_slots = _slots_of_elements(index, {name: shard.shape for name, shard in shards.items()})
    for name, number in numbers.items():
        slots = index.optimizer.state.get(index.tied.get(name, name), {})
        shape = shards[name].shape
        state[number] = {}
        for slot, value in slots.items():
            if "tensor" in value:
                saved_tensor = index.tensors[value["tensor"]]
                lies_alike = saved_tensor.shape == shape and (len(shape) > 0 or slot in elementwise_slots)
                state[number][slot] = read(saved_tensor, value["tensor"], name if lies_alike else None)
            else:
                state[number][slot] = _value(value["plain"])
    groups = [
        {
            **{key: _value(value) for key, value in saved_group["options"].items()},
            **{key: group[key] for key in _NAMES if key in group},
        }
        for group, saved_group in zip(state_dict["param_groups"], index.optimizer.groups, strict=True)
    ]
    optimizer.load_state_dict({"state": {n: slots for n, slots in state.items() if slots}, "param_groups": groups})


def _slots_of_elements(index: Index, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Slots with one value per element of a parameter, such as `exp_avg` but not `step`. The shape alone does not tell
    them apart for a parameter of no dimensions."""
    assert index.optimizer is not None
    return {
        slot
        for name, slots in index.optimizer.state.items()
        for slot, value in slots.items()
        if "tensor" in value and shapes.get(name) and index.tensors[value["tensor"]].shape == shapes[name]
    }


def _names_by_group(applied_module: Applied, optimizer: Optimizer) -> list[list[str]]:
    """The module's names of the parameters in each group. Raises SpecError for a parameter that the module does not
    have."""
    names = {id(parameter): name for name, parameter in applied_module.named_parameters()}
    problems = [
        Problem(
            "not_found",
            f"optimizer.param_groups[{position}]",
            list(parameter.shape),
            "has a parameter that is not in the module",
            "build the optimizer from applied.parameters()",
        )
        for position, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) not in names
    ]
    if problems:
        raise SpecError(problems)
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _numbers(applied_module: Applied, optimizer: Optimizer) -> dict[str, int]:
    """Numbers of parameters in the optimizer's state dictionary, by name."""
    numbers_by_group = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    return {
        name: number
        for names, numbers in zip(_names_by_group(applied_module, optimizer), numbers_by_group, strict=True)
        for name, number in zip(names, numbers, strict=True)
    }


def _plain(value: Any) -> Any:
    """JSON form of a value, which `_value` converts back. Raises TypeError for a value that is not plain."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.dim() == 0:
        return {"number": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if type(value) in (tuple, list):
        return {"tuple" if isinstance(value, tuple) else "list": [_plain(element) for element in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(element) for key, element in value.items()}}
    raise TypeError(type(value).__name__)


def _value(plain: Any) -> Any:
    match plain:
        case {"number": number, "dtype": dtype}:
            return torch.tensor(number, dtype=getattr(torch, dtype))
        case {"tuple": items}:
            return tuple(map(_value, items))
        case {"list": items}:
            return list(map(_value, items))
        case {"dict": items}:
            return {key: _value(element) for key, element in items.items()}
    return plain
