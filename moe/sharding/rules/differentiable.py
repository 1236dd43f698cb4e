"""Operators of this package that are differentiable functions of torch, within which shapes may depend on data.

A function `run` becomes two operators: the function, and its gradients, which run it again. If both have the same
sharding on a rank, its program calls `run` once, and the tensors that torch's autograd saves are kept from the forward
pass to the backward pass, as without a program.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import FunctionCtx

from moe.sharding.exchange.mesh import Mesh, OneDevice
from moe.sharding.operands import RECOMPUTED
from moe.sharding.rules.local import LocalCall

OperatorSharding = tuple[Any, ...]
"""Plain values that describe how an operator is split over axes, for example its experts. Empty on one device."""

Run = Callable[..., tuple[Tensor, ...]]
"""`run(mesh, sharding, *arguments)` returns the results; differentiable."""

Begin = Callable[..., Callable[[], tuple[Tensor, ...]]]
"""Takes the arguments of `run` and starts its first exchange. The returned function finishes and returns the
results."""


@dataclass(frozen=True, eq=False)
class DifferentiableOperator:
    """Pair of operators, `shardyard::NAME` and `shardyard::NAME_backward`.

    Arguments of the second operator are the gradients of differentiable results, each a tensor or None, and then the
    arguments of the first operator. Its results are the gradients of the `differentiable` arguments that are not None.
    """

    name: str
    run: Run
    num_results: int
    differentiable: tuple[int, ...]
    """Numbers of arguments that have a gradient."""
    differentiable_results: tuple[int, ...]
    """Numbers of results that have a gradient."""
    begin: Begin | None = None
    """`run` in two halves, for an operator that begins with an exchange."""

    @property
    def target(self) -> Any:
        """The operator in a captured graph."""
        return getattr(torch.ops.shardyard, self.name).default

    @property
    def backward_target(self) -> Any:
        return getattr(torch.ops.shardyard, f"{self.name}_backward").default

    def differentiable_in(self, arguments: Sequence[Any]) -> list[int]:
        """Numbers of the differentiable arguments that are not None."""
        return [number for number in self.differentiable if arguments[number] is not None]

    def forward_of(self, node: fx.Node) -> fx.Node | None:
        """The operator whose gradients a `_backward` operator computes: the one with the same arguments."""
        arguments = node.args[len(self.differentiable_results) :]
        candidates = node.graph.find_nodes(op="call_function", target=self.target)
        return next((candidate for candidate in candidates if _is_same_argument(candidate.args, arguments)), None)


def _is_same_argument(first: Any, second: Any) -> bool:
    """Whether two arguments are the same, or results of the same operators on the same arguments: views are created
    again in the backward pass."""
    if isinstance(first, fx.Node) and isinstance(second, fx.Node):
        return first is second or (
            first.op == second.op == "call_function"
            and first.meta.get(RECOMPUTED) == second.meta.get(RECOMPUTED)
            and first.target is second.target
            and _is_same_argument(first.args, second.args)
            and _is_same_argument(tuple(first.kwargs.items()), tuple(second.kwargs.items()))
        )
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_is_same_argument, first, second))
    return type(first) is type(second) and bool(first == second)


_BY_NAME: dict[str, DifferentiableOperator] = {}


def define_differentiable(
    name: str,
    schema: str,
    run: Run,
    shapes: Callable[..., tuple[Tensor, ...]],
    *,
    num_results: int,
    differentiable: tuple[int, ...],
    differentiable_results: tuple[int, ...],
    begin: Begin | None = None,
) -> DifferentiableOperator:
    """Define both operators. `schema` declares the arguments in torch's syntax (`Tensor x, Tensor? bias, int layer`);
    `shapes(*arguments)` returns empty results."""
    operator = _BY_NAME[name] = DifferentiableOperator(
        name, run, num_results, differentiable, differentiable_results, begin
    )
    results = ", ".join(["Tensor"] * num_results)
    gradients = ", ".join(f"Tensor? gradient_{number}" for number in differentiable_results)
    path, backward_path = f"shardyard::{name}", f"shardyard::{name}_backward"
    torch.library.define(path, f"({schema}) -> ({results})")
    torch.library.define(backward_path, f"({gradients}, {schema}) -> Tensor[]")

    @torch.library.impl(path, "CompositeExplicitAutograd")
    def _run(*arguments: Any) -> Any:
        with torch.no_grad():
            return _unpack_single(run(OneDevice(), (), *arguments))

    @torch.library.register_fake(path)
    def _(*arguments: Any) -> Any:
        return _unpack_single(shapes(*arguments))

    @torch.library.impl(backward_path, "CompositeExplicitAutograd")
    def _run_backward(*arguments: Any) -> list[Tensor]:
        gradients = arguments[: len(differentiable_results)]
        forward_arguments = arguments[len(differentiable_results) :]
        return backward(OneDevice(), name, (), gradients, *forward_arguments)

    @torch.library.register_fake(backward_path)
    def _(*arguments: Any) -> list[Tensor]:
        forward_arguments = arguments[len(differentiable_results) :]
        return [torch.empty_like(forward_arguments[number]) for number in operator.differentiable_in(forward_arguments)]

    def save_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.constants = [None if isinstance(value, Tensor) else (value,) for value in inputs]  # type: ignore[attr-defined]
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(
            *(output for number, output in enumerate(outputs) if number not in differentiable_results)
        )

    def backward_pass(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        tensors = iter(ctx.saved_tensors)
        inputs = [next(tensors) if entry is None else entry[0] for entry in ctx.constants]
        result_gradients = [gradients[number] for number in differentiable_results]
        input_gradients: list[Any] = [None] * len(inputs)
        if any(gradient is not None for gradient in result_gradients):
            computed_gradients = operator.backward_target(*result_gradients, *inputs)
            for number, gradient in zip(operator.differentiable_in(inputs), computed_gradients, strict=True):
                input_gradients[number] = gradient
        return tuple(input_gradients)

    torch.library.register_autograd(path, backward_pass, setup_context=save_context)
    return operator


def _unpack_single(results: tuple[Tensor, ...]) -> Any:
    return results[0] if len(results) == 1 else results


def forward(mesh: Mesh, name: str, sharding: OperatorSharding, *arguments: Any) -> tuple[Tensor, ...]:
    """Results of the operator, without saving anything for its gradients."""
    with torch.no_grad():
        return _BY_NAME[name].run(mesh, sharding, *arguments)


def forward_kept(
    mesh: Mesh, name: str, sharding: OperatorSharding, *arguments: Any
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """(results, tensors for `gradients_of_kept`: differentiable results with torch's autograd graph, and its
    leaves)."""
    operator = _BY_NAME[name]
    leaves, inputs = _leaves(operator, arguments)
    with torch.enable_grad():
        results = operator.run(mesh, sharding, *inputs)
    return _with_history(operator, results, leaves)


def begin_forward(mesh: Mesh, name: str, sharding: OperatorSharding, *arguments: Any) -> Callable[[], Any]:
    """Start the operator's exchange. The returned function finishes and returns the result of `forward`."""
    begin = _BY_NAME[name].begin
    assert begin is not None, name
    with torch.no_grad():
        finish_run = begin(mesh, sharding, *arguments)
    return torch.no_grad()(finish_run)


def begin_forward_kept(mesh: Mesh, name: str, sharding: OperatorSharding, *arguments: Any) -> Callable[[], Any]:
    """Start the operator's exchange. The returned function finishes and returns the result of `forward_kept`."""
    operator = _BY_NAME[name]
    assert operator.begin is not None, name
    leaves, inputs = _leaves(operator, arguments)
    with torch.enable_grad():
        finish_run = operator.begin(mesh, sharding, *inputs)

    def finish_kept() -> tuple[tuple[Tensor, ...], list[Tensor]]:
        with torch.enable_grad():
            results = finish_run()
        return _with_history(operator, results, leaves)

    return finish_kept


def finish(pending: Callable[[], Any]) -> Any:
    """Finish an operator that has started, and return its result."""
    return pending()


def _with_history(
    operator: DifferentiableOperator, results: tuple[Tensor, ...], leaves: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    return tuple(result.detach() for result in results), [
        *(results[number] for number in operator.differentiable_results),
        *leaves,
    ]


def gradients_of_kept(saved_tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of the leaves, from the tensors that `forward_kept` has saved."""
    results, leaves = saved_tensors[: len(gradients)], saved_tensors[len(gradients) :]
    pairs = [
        (result, gradient.to(result.dtype))
        for result, gradient in zip(results, gradients, strict=True)
        if gradient is not None and result.requires_grad
    ]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    outputs, output_gradients = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outputs, leaves, output_gradients, allow_unused=True, materialize_grads=True,
                                    retain_graph=True))  # fmt: skip


def backward(
    mesh: Mesh, name: str, sharding: OperatorSharding, gradients: Sequence[Tensor | None], *arguments: Any
) -> list[Tensor]:
    """Gradients of the differentiable arguments. The function is run again, since nothing was saved."""
    return gradients_of_kept(forward_kept(mesh, name, sharding, *arguments)[1], gradients)


def _leaves(operator: DifferentiableOperator, arguments: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
    """(differentiable arguments as leaves of a new autograd graph, all arguments with these in place)."""
    inputs, leaves = list(arguments), []
    for number in operator.differentiable_in(arguments):
        inputs[number] = arguments[number].detach().requires_grad_()
        leaves.append(inputs[number])
    return leaves, inputs


def lower_forward(local: LocalCall, operator: DifferentiableOperator, sharding: OperatorSharding) -> fx.Node:
    """The operator on a rank's parts."""
    arguments, _ = local.arguments()
    run = local.runtime(forward_kept if local.is_kept else forward, operator.name, sharding, *arguments)
    return _lowered_results(local, operator, run, arguments)


def lower_begun(local: LocalCall, operator: DifferentiableOperator, sharding: OperatorSharding) -> fx.Node:
    """The operator on a rank's parts, in two calls: one starts its exchange, one finishes the operator."""
    arguments, _ = local.arguments()
    begin = begin_forward_kept if local.is_kept else begin_forward
    run = local.call(finish, local.runtime(begin, operator.name, sharding, *arguments))
    return _lowered_results(local, operator, run, arguments)


def _lowered_results(
    local: LocalCall, operator: DifferentiableOperator, run: fx.Node, arguments: Sequence[Any]
) -> fx.Node:
    """All results, or the single one itself, from a call of `forward` or `forward_kept`."""
    results = run
    if local.is_kept:
        results, saved_tensors = local.call(getitem, run, 0), local.call(getitem, run, 1)
        number = len(operator.differentiable_results) + len(operator.differentiable_in(arguments))
        local.keep([local.call(getitem, saved_tensors, index) for index in range(number)])
    return results if operator.num_results > 1 else local.call(getitem, results, 0)


def lower_backward(local: LocalCall, operator: DifferentiableOperator, sharding: OperatorSharding) -> fx.Node:
    """The gradients of the operator on a rank's parts."""
    arguments, _ = local.arguments()
    gradients, forward_arguments = (
        arguments[: len(operator.differentiable_results)],
        arguments[len(operator.differentiable_results) :],
    )
    if local.saved_parts:
        return local.call(gradients_of_kept, list(local.saved_parts), list(gradients))
    return local.runtime(backward, operator.name, sharding, list(gradients), *forward_arguments)
