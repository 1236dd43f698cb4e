"""Creation of this rank's parts of a module's parameters and buffers, one submodule after the other: from the module's
values; on the meta device, from initial values; or uninitialised, for a checkpoint to fill."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe.random import fold_name
from moe.sharding.applied.applied import Applied, Submodule
from moe.sharding.applied.dtensors import as_dtensor, cut
from moe.sharding.placement import stored_extent
from moe.spec import Problem, SpecError, spec_error

Init = Callable[[str, Tensor], None]
"""Function of (name, whole tensor) that fills the tensor."""


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


@dataclass(frozen=True, eq=False)
class Materialiser:
    """Fills an empty applied module with this rank's parts."""

    applied: Applied
    device: torch.device
    seed: int = 0
    init: Init | None = None
    is_given: Callable[[Sequence[str], bool], bool] = lambda names, is_persistent: False
    """Function of (names of a tensor, whether it is persistent): whether a checkpoint fills the tensor later."""

    def fill(self, model: nn.Module) -> None:
        """Fill with the parts of a module. Raises SpecError for tensors on the meta device that nothing gives values,
        and for names that are attributes of every applied module."""
        if conflicts := list(self._name_conflicts(model)):
            raise SpecError(conflicts)
        names: dict[int, list[str]] = {}
        for name, tensor in tensors_of(model).items():
            names.setdefault(id(tensor), []).append(name)
        parts: dict[int, Tensor] = {}
        owners: dict[int, Submodule | Applied] = {}
        problems: list[Problem] = []
        for path, module in model.named_modules(remove_duplicate=False):
            if (known_owner := owners.get(id(module))) is not None:
                self._add_module(path, known_owner)
                continue
            owner = owners[id(module)] = Submodule() if path else self.applied
            if path:
                self._add_module(path, owner)
            owner.stand_for(module)
            persistent = set(module._buffers) - module._non_persistent_buffers_set | set(module._parameters)
            tensors = {attribute: tensor for attribute, tensor in _direct_tensors(module) if tensor is not None}
            new_tensors = {attribute: tensor for attribute, tensor in tensors.items() if id(tensor) not in parts}
            later_names = {
                attribute
                for attribute, tensor in new_tensors.items()
                if self.is_given(names[id(tensor)], attribute in persistent)
            }
            empty = [
                attribute
                for attribute, tensor in new_tensors.items()
                if tensor.is_meta and attribute not in later_names
            ]
            initial = _initial(module, path, empty, self.seed, self.init) if empty else {}
            problems += _uninitialized_problems(module, path, sorted(set(empty) - set(initial)), self.init)
            for attribute, tensor in tensors.items():
                if id(tensor) not in parts:
                    values = None if attribute in later_names else initial.get(attribute, tensor.detach())
                    parts[id(tensor)] = self._part(names[id(tensor)][0], tensor, values)
                part = parts[id(tensor)]
                if isinstance(part, nn.Parameter):
                    owner.register_parameter(attribute, part)
                else:
                    owner.register_buffer(attribute, part, attribute in persistent)
        if problems:
            raise SpecError(problems)

    def _name_conflicts(self, model: nn.Module) -> Iterator[Problem]:
        """Problems of names that are attributes already, so that torch would not register a tensor or module under
        them."""
        root_names, submodule_names = {*dir(Applied), *vars(self.applied)}, set(dir(Submodule))
        for path, module in model.named_modules():
            for name in (*module._modules, *module._parameters, *module._buffers):
                if name in (submodule_names if path else root_names):
                    rule = "is an attribute of applied modules"
                    remedy = f"rename it, or wrap the module: `inner.{name}`"
                    yield Problem("conflict", f"{path}.{name}" if path else name, None, rule, remedy)

    def _add_module(self, path: str, module: nn.Module) -> None:
        parent_path, _, name = path.rpartition(".")
        self.applied.get_submodule(parent_path).add_module(name, module)

    def _part(self, name: str, tensor: Tensor, full_tensor: Tensor | None) -> Tensor:
        """This rank's DTensor of a tensor, with values from `full_tensor`, or uninitialised if it is None. Buffers
        that no axis splits are plain tensors."""
        placements, mesh = self.applied.placements_of(name), self.applied.mesh
        if full_tensor is None or full_tensor.is_meta:
            _, shape = stored_extent(tensor.shape, placements, mesh.degrees, mesh.indices)
            shard = torch.empty(shape, dtype=tensor.dtype, device=self.device)
        else:
            shard = cut(full_tensor, placements, mesh).to(self.device, tensor.dtype, copy=True).contiguous()
        if not isinstance(tensor, nn.Parameter):
            is_cut = any(placement.dim is not None for placement in placements)
            return as_dtensor(shard, tensor.shape, placements, mesh) if is_cut else shard
        if not tensor.requires_grad:
            self.applied._frozen_names.append(name)
        return nn.Parameter(as_dtensor(shard, tensor.shape, placements, mesh), tensor.requires_grad)


def _direct_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    yield from module._parameters.items()
    yield from module._buffers.items()


def _initial(module: nn.Module, path: str, names: list[str], seed: int, init: Init | None) -> dict[str, Tensor]:
    """Whole initial values of a module's own tensors: from `init`, and of tensors that it does not fill, from the
    module's `reset_parameters`; with random numbers of (seed, path). Tensors that neither fills are left out."""
    values: dict[str, Tensor] = {}
    if init is not None:
        shell = _Shell(module)
        with _drawing(seed, path):
            for name in names:
                init(f"{path}.{name}" if path else name, shell.initial_values[name])
        values = shell.collect_filled()
    reset = getattr(type(module), "reset_parameters", None)
    if reset is not None and set(names) - set(values):
        shell = _Shell(module)
        with _drawing(seed, path):
            try:
                reset(shell.module)
            except AttributeError as error:
                rule = f"cannot run on its own: {error}"
                remedy = "use only the module's own tensors in it, or pass apply(init=...)"
                raise spec_error("user_code", f"{path or 'model'}.reset_parameters", None, rule, remedy) from None
        values = shell.collect_filled() | values
    return {name: values[name] for name in names if name in values}


@contextmanager
def _drawing(seed: int, path: str) -> Iterator[None]:
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(fold_name(seed, path) & (2**63 - 1))
        yield


class _Shell:
    """Copy of a module without submodules, whose tensors are to be filled. A tensor that keeps its filler value was not
    filled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.copy(module)
        self.module._parameters, self.module._buffers, self.module._modules = {}, {}, {}
        self.initial_values: dict[str, Tensor] = {}
        for name, tensor in _direct_tensors(module):
            if tensor is not None:
                self.initial_values[name] = _filler(tensor) if tensor.is_meta else tensor.detach().clone()
            if name in module._buffers:
                self.module._buffers[name] = self.initial_values.get(name)
            else:
                parameter = None if tensor is None else nn.Parameter(self.initial_values[name], requires_grad=False)
                self.module._parameters[name] = parameter
        self._versions = {name: tensor._version for name, tensor in self.initial_values.items()}

    def collect_filled(self) -> dict[str, Tensor]:
        values = {}
        for name, tensor in _direct_tensors(self.module):
            initial_value = self.initial_values.get(name)
            if tensor is None or initial_value is None:
                continue
            if tensor.data_ptr() != initial_value.data_ptr() or self._was_written(name, tensor):
                values[name] = tensor.detach()
        return values

    def _was_written(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor was written: by its version, or by its values if the version was bypassed."""
        if self.initial_values[name]._version > self._versions[name] or not tensor.numel():
            return True
        return not bool(((tensor == _filler(tensor)) | (tensor != tensor)).all())


def _filler(tensor: Tensor) -> Tensor:
    value = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 77
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")


def _uninitialized_problems(module: nn.Module, path: str, names: list[str], init: Init | None) -> Iterator[Problem]:
    kind = type(module).__name__
    if init is not None:
        rule, remedy = "is on the meta device and is not filled by init", "fill it in init"
    elif hasattr(module, "reset_parameters"):
        rule = f"is on the meta device and is not filled by {kind}.reset_parameters"
        remedy = "fill it there, pass apply(init=...)"
    else:
        rule = f"is on the meta device, and {kind} has no reset_parameters"
        remedy = "pass apply(init=...)"
    remedy += " or pass a module with values"
    for name in names:
        yield Problem("uninitialized", f"{path}.{name}" if path else name, "meta", rule, remedy)
