"""A module applied to a mesh: DTensors under the module's own names, and the program that uses them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import Signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from moe.sharding import torch_private
from moe.sharding.applied.accumulation import check_once
from moe.sharding.applied.agreement import REFUSED, agree, can_agree, signature_of
from moe.sharding.applied.batch import check_batch
from moe.sharding.applied.callable_program import CallableProgram
from moe.sharding.applied.checksum import EVERY_CALLS, check_same
from moe.sharding.applied.dtensors import as_dtensor, from_program, local, to_program
from moe.sharding.applied.local_batch import global_batch
from moe.sharding.applied.programs import Programs
from moe.sharding.applied.wrappers import refuse_wrapper
from moe.sharding.arguments import arguments_of, canonical
from moe.sharding.capture.capture import TENSOR
from moe.sharding.exchange.exchange import strip_padding
from moe.sharding.exchange.mesh import Draws, Mesh
from moe.sharding.parameters import APPLIED
from moe.sharding.partition.program import Program
from moe.sharding.placement import Placements, stored_extent


@dataclass(frozen=True)
class LocalShard:
    """A rank's shard of a tensor, as a plain tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    part: Tensor
    is_first: bool
    """Whether this rank is the first of the ranks that have this part."""


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


class _FixedModule(nn.Module):
    """A module whose tensors must keep the device and dtype of the plan, and whose attributes must keep the values that
    the program was captured with."""

    _planned_mode: bool | None = None
    """Mode, training or not, of the original module."""
    _attribute_names: frozenset[str] = frozenset()
    """Attributes of the original module, whose values were captured in the program."""

    def stand_for(self, module: nn.Module) -> None:
        torch_private.refuse_composable(self, refuse_wrapper)
        self._planned_mode = module.training
        self._attribute_names = frozenset(
            name for name in vars(module) if name not in _MODULE_ATTRIBUTES and name[0] != "_"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._attribute_names:
            raise AttributeError(
                f"{name} (={value!r}) cannot be set on an applied module; set it on the original module, then plan and "
                "apply again"
            )
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Called by torch for `to`, `cuda`, `half` and so on. Raises RuntimeError if a tensor would change."""
        for tensor in (*self.parameters(), *self.buffers()):
            converted = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (converted.dtype, converted.device) != (tensor.dtype, tensor.device):
                raise RuntimeError(
                    f"an applied module cannot be converted from {tensor.dtype} on {tensor.device} to "
                    f"{converted.dtype} on {converted.device}; convert the original module, then plan and apply again"
                )
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Called by torch. Whole tensors, such as those of the plain module, are reduced to this rank's shards."""
        for name, tensor in (*self._parameters.items(), *self._buffers.items()):
            full_tensor: Any = state_dict.get(prefix + name)
            if (
                isinstance(tensor, DTensor)
                and type(full_tensor) in (Tensor, nn.Parameter)
                and full_tensor.shape == tensor.shape
            ):
                state_dict[prefix + name] = distribute_tensor(
                    full_tensor.detach().to(tensor.to_local().device),
                    tensor.device_mesh,
                    tensor.placements,
                    src_data_rank=None,
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


class Submodule(_FixedModule):
    """A submodule of an applied module: it holds parts, and computes nothing by itself."""

    def forward(self, *_: Any) -> Any:
        raise RuntimeError("a submodule of an applied module cannot be called; call the applied module")

    def train(self, mode: bool = True) -> "Submodule":
        """Raises RuntimeError if the mode would change for this submodule only."""
        if any(module.training != mode for module in self.modules()):
            call = "train()" if mode else "eval()"
            raise RuntimeError(
                f"{call} has no effect on a submodule of an applied module; call it on the original module's "
                "submodule, then plan and apply again"
            )
        return self

    def _no_hook(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "a hook on a submodule of an applied module never runs, because submodules are not called; return "
            "from forward what the hook needs, then plan and apply again"
        )

    register_forward_hook = register_forward_pre_hook = register_backward_hook = _no_hook
    register_full_backward_hook = register_full_backward_pre_hook = _no_hook


class Applied(_FixedModule):
    """The module on this rank. Call it with the same global batch on every rank."""

    def __init__(
        self,
        mesh: Mesh,
        shapes: dict[str, tuple[int, ...]],
        placements: dict[str, Placements],
        programs: Programs,
        device: torch.device,
        is_local: bool = False,
        forward_signature: Signature | None = None,
    ) -> None:
        """`is_local` is whether each rank is called with rows of its own."""
        super().__init__()
        self._forward_signature = forward_signature
        self.mesh, self._shapes, self._placements, self._device = mesh, shapes, placements, device
        self._programs, self._is_local, self._num_calls = programs, is_local, 0
        self._agrees = can_agree(mesh)
        self._owners: dict[str, tuple[dict[str, Any], str]] = {}
        """(dict that holds a parameter or buffer, its key there), by the name in this module."""
        self._frozen_names: list[str] = []
        """Parameters that were planned without a gradient."""
        self._is_closed = False
        APPLIED.add(self)

    @property
    def draws(self) -> Draws:
        """Seed and step of random numbers. In training, every call increments `step`; set it to resume."""
        return self.mesh.draws

    @property
    def program(self) -> Program:
        """The program of the current mode, training or not, for batches of the plan's size."""
        return self._programs.program_of_plan(self.training).program

    def compile(self, *args: Any, **options: Any) -> None:
        """Have `torch.compile` compile the forward and the backward program, each when it first runs, with these
        options. Raises RuntimeError for a step over micro-batches."""
        if self._programs.initial.steps is not None:
            raise RuntimeError(
                "a step over micro-batches cannot be compiled; omit compile() or plan with micro_batches=1"
            )
        self._programs.compile(dict(zip(("fullgraph",), args, strict=False)) | options)

    def train(self, mode: bool = True) -> "Applied":
        """Set the mode. In the planned mode, submodules get the modes that they had in the plan; otherwise all get the
        mode."""
        for module in self.modules():
            planned_mode = (
                module._planned_mode if mode == self._planned_mode and isinstance(module, _FixedModule) else None
            )
            module.training = mode if planned_mode is None else planned_mode
        return self

    def __deepcopy__(self, memo: Any) -> "Applied":
        raise TypeError("an applied module cannot be copied; apply the plan again, or copy its parameters")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an applied module cannot be pickled: it holds this rank's shards and process groups; use sharding.save, "
            "or pickle sharding.state_dict(applied)"
        )

    def _check_use(self) -> None:
        """Raises RuntimeError after `close`, and within `torch.autocast`, which would have no effect."""
        if self._is_closed:
            raise RuntimeError("the applied module was closed by sharding.close; apply the plan again")
        if torch.is_autocast_enabled(self._device.type):
            raise RuntimeError(
                "torch.autocast around an applied module has no effect: the plan fixes all dtypes; use "
                "`with torch.autocast(...)` inside the module's forward, then plan and apply again"
            )

    def forward(self, *batch: Any, **keywords: Any) -> Any:
        self._check_use()
        callable_program, inputs = self._called_with(self._arguments(batch, keywords))
        program = callable_program.running
        leaf_tensors = [self._argument(leaf.kind, leaf.name, inputs, program) for leaf in program.leaves]
        frozen_parameters = {
            name: owner[key]
            for name, (owner, key) in zip(self._frozen_names, map(self._owner, self._frozen_names), strict=True)
        }
        if torch.is_grad_enabled() and (
            names := [name for name, parameter in frozen_parameters.items() if parameter.requires_grad]
        ):
            raise RuntimeError(
                f"{', '.join(names)} requires a gradient that was not planned; set requires_grad on the original "
                "module's parameters, then plan and apply again"
            )
        is_step = program.backward is not None and torch.is_grad_enabled()
        if callable_program.steps is not None:
            count = program.num_outputs + len(program.updates)
            parts = self._parts(program, leaf_tensors)
            results = callable_program.steps(
                self.mesh, parts, count, lambda gradients: self._gradients(program, gradients)
            )
            outputs = self._update_buffers(program, results)[0]
        elif is_step:
            outputs = _Step.apply(self, program, *leaf_tensors)
        else:
            with torch.no_grad():
                outputs = self._run(
                    callable_program.forward_only, self._parts(callable_program.forward_only, leaf_tensors)
                )[0]
        self.draws.step += self.training
        values, tensors = list(callable_program.values), iter(outputs)
        for index, value in enumerate(values):
            if value is TENSOR:
                values[index] = next(tensors)
        return pytree.tree_unflatten(values, callable_program.tree)

    def arguments_of(self, batch: Any) -> tuple[Any, ...]:
        """Canonical arguments of a call for a batch, which may have any form that a sample may have."""
        return tuple(arguments_of(self._forward_signature, batch))

    def _arguments(self, positional: Sequence[Any], keywords: dict[str, Any]) -> tuple[Any, ...]:
        """Canonical arguments of a call. Raises TypeError for arguments that the module does not take; other ranks then
        raise ValueError."""
        try:
            return canonical(self._forward_signature, positional, keywords)
        except TypeError:
            callable_program = self._programs.initial
            self._num_calls += 1  # as on the other ranks, which go on to compare their batches
            if self._is_local:
                with suppress(ValueError):
                    global_batch(self.mesh, [None], callable_program.batch, callable_program.batch_tree, self._device)
            elif self._agrees:
                agree(self.mesh, REFUSED)
            raise

    def _called_with(self, batch: Sequence[Any]) -> tuple[CallableProgram, list[Any]]:
        """(program for a batch, leaves of the global batch). Raises ValueError for a batch that differs from the plan's
        in more than sizes, and, on every rank, if ranks are found to have different batches."""
        callable_program, is_checked = self._programs.initial, self._num_calls % EVERY_CALLS == 0
        self._num_calls += 1
        if self._is_local:
            batch = global_batch(self.mesh, batch, callable_program.batch, callable_program.batch_tree, self._device)
        try:
            inputs = check_batch(batch, callable_program.batch, callable_program.batch_tree)
        except ValueError:
            if self._agrees:
                agree(self.mesh, REFUSED)
            elif is_checked:
                check_same(self.mesh, None, callable_program.batch, self._device)
            raise
        if self._agrees:
            sizes = [tuple(leaf.shape) for leaf in inputs if isinstance(leaf, Tensor)]
            agree(self.mesh, signature_of(self.training, torch.is_grad_enabled(), sizes))
        if is_checked:
            check_same(self.mesh, inputs, callable_program.batch, self._device)
        return self._programs.program_of_batch(self.training, batch), inputs

    def _argument(self, kind: str, name: str, inputs: list[Any], program: Program) -> Tensor:
        match kind:
            case "input":
                return inputs[int(name.split(".")[1])]
            case "constant":
                return program.constants[name]
            case _:
                owner, key = self._owner(name)
                return owner[key]

    def _parts(self, program: Program, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Arguments of a program: plain tensors, and this rank's parts of DTensors. Differentiable."""
        return [
            to_program(tensor.to_local(), self._shapes[leaf.name], self._placements[leaf.name], self.mesh)
            if isinstance(tensor, DTensor)
            else tensor
            for leaf, tensor in zip(program.leaves, tensors, strict=True)
        ]

    def _owner(self, name: str) -> tuple[dict[str, Any], str]:
        if name not in self._owners:
            path, _, key = name.rpartition(".")
            owner = self.get_submodule(path)
            self._owners[name] = (owner._parameters if key in owner._parameters else owner._buffers, key)
        return self._owners[name]

    def _run(self, program: Program, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(outputs, tensors saved for the backward pass)."""
        return self._update_buffers(program, program.forward(self.mesh, [tensor.detach() for tensor in tensors]))

    def _update_buffers(
        self, program: Program, results: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Write new values into the buffers. Returns (outputs, results after the new values of buffers)."""
        num_returned = program.num_outputs + len(program.updates)
        buffers = [owner[key] for owner, key in map(self._owner, program.updates)]
        if buffers:  # results may share memory with the old values
            pointers = {local(buffer).untyped_storage().data_ptr() for buffer in buffers}
            results = [
                result.clone() if result.untyped_storage().data_ptr() in pointers else result for result in results
            ]
        outputs, updates = results[: program.num_outputs], results[program.num_outputs : num_returned]
        for name, buffer, new_value in zip(program.updates, buffers, updates, strict=True):
            with torch.no_grad():
                local(buffer).copy_(from_program(new_value, self._shapes[name], self._placements[name], self.mesh))
        return tuple(outputs), tuple(results[num_returned:])

    def _gradients(self, program: Program, results: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the program's arguments, without padding, from the results of its backward pass."""
        parts = dict(zip(program.gradients, results, strict=True))
        gradients: list[Tensor | None] = []
        for leaf in program.leaves:
            part = parts.get(leaf.name) if leaf.kind == "parameter" else None
            if part is not None:
                # fused optimizers assume that a gradient has the memory layout of its parameter
                part = strip_padding(part, leaf.shape, program.placements[leaf.name], self.mesh).contiguous()
            gradients.append(part)
        return gradients

    def _gradients_like(self, program: Program, results: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The same gradients, as DTensors for parameters that are DTensors."""
        gradients = self._gradients(program, results)
        for index, (leaf, part) in enumerate(zip(program.leaves, gradients, strict=True)):
            owner, key = self._owner(leaf.name) if part is not None else ({}, "")
            if part is not None and isinstance(parameter := owner[key], DTensor):
                shard = from_program(part, leaf.shape, self._placements[leaf.name], self.mesh)
                gradients[index] = torch_private.dtensor_like(parameter, shard)
        return gradients

    def names(self) -> list[list[str]]:
        """All names of each parameter and buffer; those that are tied have several."""
        names: dict[int, list[str]] = {}
        for name, tensor in self._tensors():
            names.setdefault(id(tensor), []).append(name)
        return list(names.values())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named_parameters(remove_duplicate=False)
        yield from self.named_buffers(remove_duplicate=False)

    def placements_of(self, name: str) -> Placements:
        return self._placements[name]

    def shards(self) -> dict[str, LocalShard]:
        """This rank's part of every parameter and buffer."""
        tensors = dict(self._tensors())
        return {name: self.shard_of(name, tensors[name]) for name in self._shapes if name in tensors}

    def shard_of(self, name: str, tensor: Tensor) -> LocalShard:
        """This rank's shard of a tensor that is sharded like a parameter: its gradient or optimizer state."""
        shape, placements = self._shapes[name], self._placements[name]
        offsets, _ = stored_extent(shape, placements, self.mesh.degrees, self.mesh.indices)
        replicate_axes = [axis for axis, placement in enumerate(placements) if placement.dim is None]
        return LocalShard(shape, offsets, local(tensor.detach()), self.mesh.is_first(replicate_axes))

    def sharded_like(self, name: str, shard: Tensor) -> Tensor:
        """DTensor with the placements of a parameter, such as its optimizer state, from this rank's shard."""
        return as_dtensor(shard, self._shapes[name], self._placements[name], self.mesh)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, applied: Applied, program: Program, *tensors: Tensor) -> tuple[Tensor, ...]:
        parts = applied._parts(program, tensors)
        outputs, saved_tensors = applied._run(program, parts)
        ctx.applied, ctx.program, ctx.draws = applied, program, replace(applied.draws)
        ctx.num_saved = len(saved_tensors)
        leaf_numbers = sorted({number for kind, number in program.backward_arguments if kind == "leaf"})
        ctx.leaves = {number: index for index, number in enumerate(leaf_numbers)}
        ctx.save_for_backward(*saved_tensors, *(parts[number] for number in leaf_numbers))
        ctx.set_materialize_grads(False)
        differentiable_ids = {id(outputs[index]) for index in program.tangents}
        results = [
            output if index in program.tangents or id(output) not in differentiable_ids else output.clone()
            for index, output in enumerate(outputs)
        ]
        ctx.mark_non_differentiable(*(output for index, output in enumerate(results) if index not in program.tangents))
        ctx.outputs = [(output.shape, output.dtype, output.device) for output in results]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        check_once()
        program, module, tensors = ctx.program, ctx.applied, ctx.saved_tensors
        module._check_use()
        saved_tensors, leaves = tensors[: ctx.num_saved], tensors[ctx.num_saved :]
        arguments = []
        for kind, number in program.backward_arguments:
            if kind == "saved":
                arguments.append(saved_tensors[number])
            elif kind == "leaf":
                arguments.append(leaves[ctx.leaves[number]].detach())
            else:
                arguments.append(_tangent(tangents, program.tangents[number], ctx.outputs))
        del saved_tensors, leaves, tensors
        ctx.maybe_clear_saved_tensors()  # the program frees each after its last use, unless the graph is retained
        with module.draws.set_to(ctx.draws):
            gradients = program.backward(module.mesh, arguments)
        tangent_numbers = {index for index, tangent in enumerate(tangents) if tangent is not None}
        gradients = [
            gradient if tangent_numbers & needed_tangents or not needed_tangents else None
            for gradient, needed_tangents in zip(gradients, program.needed_tangents, strict=True)
        ]
        return None, None, *module._gradients_like(program, gradients)


def _tangent(tangents: Sequence[Tensor | None], number: int, outputs: Sequence[Any]) -> Tensor:
    """Tangent of an output: zeros if the loss does not depend on it."""
    tangent = tangents[number]
    if tangent is not None:
        return tangent.contiguous()
    shape, dtype, device = outputs[number]
    return torch.zeros(shape, dtype=dtype, device=device)


def close(applied: Applied) -> None:
    """Close an applied module, which cannot be called any more, for example to free its optimizer and apply another
    plan."""
    applied._is_closed = True
