"""Problems of modules that cannot be captured: the user's line, the rule and the remedy."""

import re
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from moe.sharding import torch_private
from moe.sharding.lines import checking_function, line_of, line_of_forward, user_line
from moe.spec import ProblemCode, SpecError, spec_error

_READS = (".numpy()", "data-dependent", "data dependent", "data is not allocated yet")


def cannot(module: nn.Module, error: BaseException, run: Callable[[], Any]) -> SpecError:
    """The refusal for an error that was raised while a module was captured; `run` runs the module once more."""
    line = user_line(error) or line_of_forward(module)
    cause = error.__cause__ or error
    text = str(cause).strip() or type(cause).__name__
    code: ProblemCode = "not_capturable"
    match cause:
        case torch_private.DataDependentOutputException():
            rule, remedy = _read_reason(error)
        case torch_private.DynamicOutputShapeException():
            rule = f"must not have data-dependent shapes ({cause.func})"
            remedy = "use an operator with a fixed result shape, such as a mask instead of positions"
            if "nonzero" in str(cause.func):
                remedy = _POSITIONS
            if "ctc_loss" in str(cause.func):
                remedy = "return the log-probabilities, and compute the loss from the applied module's output"
        case torch_private.UnsupportedOperatorException():
            rule, remedy = _without_fake(str(cause.func))
        case _ if (custom_operator := _CUSTOM_WITHOUT_FAKE.search(text)) is not None:
            rule, remedy = _without_fake(custom_operator[1])
        case _ if any(phrase in text.lower() for phrase in _READS):
            rule, remedy = _READ
        case AssertionError() if "Unexpected fake" in text:
            rule = "keeps a tensor between calls in a place that capture cannot find"
            remedy = "compute it in __init__ and register it as a buffer"
        case AssertionError() if "entirely functional graph" in text:
            with _Changes() as changes:
                run()
            line = changes.line or line
            rule = "modifies in place a tensor that is neither registered nor created in forward"
            remedy = "register it as a buffer"
        case _ if "file a bug in PyTorch" in text:
            rule = "must only compute: it cannot be captured as one forward and backward graph"
            remedy = "call backward and optimizers outside the module"
        case _:
            code = "user_code"
            rule = f"cannot be captured: {type(cause).__name__}: {text.splitlines()[0]}"
            remedy = "fix the module so that it runs on the sample"
    if (rule, remedy) == _READ and (function := checking_function(error)):
        rule = f"must not call {function}, which reads a tensor's values for a check"
        remedy = "write out its computation without the check"
    return spec_error(code, line, _path_of(module, error), rule, remedy)


_CUSTOM_WITHOUT_FAKE = re.compile(r"no fake impl registered for <CustomOpDef\((.+?)\)>")


def _without_fake(operator: str) -> tuple[str, str]:
    """(rule, remedy) for an operator that cannot run on fake tensors."""
    return (f"calls {operator}, which has no fake implementation", "register one with torch.library.register_fake")


_POSITIONS = (
    "use a mask instead of positions; replace a loop over experts that selects tokens (torch.where(index == e)) by "
    "a product with stacked weights: "
    'h = act(torch.einsum("tm,emh->teh", x, w_in)); y = torch.einsum("teh,ehm,te->tm", h, w_out, gates), with '
    "gates = torch.zeros(T, E).scatter(1, index, weight); moe.MoELayer dispatches by index"
)

_READ = (
    "must not read a tensor's values: control flow would depend on the data",
    "use torch.where, or compute it before calling the module",
)
_INDEX = "must not read a tensor's values, as indexing with a 0-dimensional tensor does"
_TAKEN = (_INDEX, "use i.view(1), as in h.index_select(0, i.view(1))")
_READ_BY = {
    "__getitem__": _TAKEN,
    "select": _TAKEN,
    "__setitem__": (_INDEX, "use i.view(1), as in q = q.index_copy(0, i.view(1), h.unsqueeze(0))"),
    "narrow": ("must not read a tensor's values, as a tensor for the start of narrow is read",
               "use positions: h.index_select(0, start + torch.arange(length))"),
}  # fmt: skip
_BOUNDS = (
    "must not read a tensor's values, as tensors for slice bounds are read",
    "use a mask of positions, as torch.arange(len(h)) < n",
)
_MOMENTUM = (
    "must not read a tensor's values, as batch norm with momentum=None reads num_batches_tracked",
    "set momentum, as momentum=0.1",
)


def _read_reason(error: BaseException) -> tuple[str, str]:
    """(rule, remedy) for an error raised because a tensor's value was read, by the torch function that reads it."""
    trace, reason = error.__traceback__, _READ
    while trace is not None:
        code, local_variables = trace.tb_frame.f_code, trace.tb_frame.f_locals
        if code.co_filename.endswith("torch/nn/modules/batchnorm.py"):
            return _MOMENTUM
        if code.co_name == "__torch_function__":
            reason = _READ_BY.get(getattr(local_variables.get("func"), "__name__", ""), reason)
            index = local_variables.get("args", ())[1:2]
            if reason is _TAKEN and any(isinstance(leaf, slice) for leaf in pytree.tree_leaves(index)):
                reason = _BOUNDS
        trace = trace.tb_next
    return reason


def _path_of(module: nn.Module, error: BaseException) -> str:
    """Path and class of the innermost module whose method raised an error."""
    paths = {id(submodule): path for path, submodule in module.named_modules()}
    path, trace = "", error.__traceback__
    while trace is not None:
        path = paths.get(id(trace.tb_frame.f_locals.get("self"))) or path
        trace = trace.tb_next
    return f"{path} ({type(module.get_submodule(path)).__name__})" if path else type(module).__name__


class _Changes(TorchFunctionMode):
    """Finds the user's line that changes the given tensor in place; without a tensor, the line that changes any tensor
    that is not fake."""

    def __init__(self, tensor: Tensor | None = None) -> None:
        super().__init__()
        self._tensor, self.line = tensor, ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        tensor = first if self._tensor is None else self._tensor
        is_watched = self._tensor is not None or type(first) is Tensor
        version = tensor._version if is_watched and tensor is not None else 0
        result = func(*args, **(kwargs or {}))
        is_changed = is_watched and tensor is not None and tensor._version != version
        if not self.line and (is_changed or self._is_in_place(func, first)):
            self.line = line_of(sys._getframe(1))
        return result

    def _is_in_place(self, func: Any, first: Tensor | None) -> bool:
        """Whether a function changes the tensor through its `data`, or through a fake copy of it."""
        name = getattr(func, "__name__", "")
        if first is None or not ((name.endswith("_") and not name.endswith("__")) or name in _SETTING):
            return False
        if self._tensor is None:
            return type(first) is Tensor
        return first.untyped_storage() is self._tensor.untyped_storage()


_SETTING = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "pow"))}


def in_place_change(module: nn.Module, run: Callable[[], Any], name: str, tensor: Tensor, is_input: bool) -> SpecError:
    """The refusal for an input or a parameter that is changed in place; the module is run once more to find the
    line."""
    with _Changes(tensor) as changes:
        run()
    kind = "an input" if is_input else "a parameter"
    remedy = "modify a copy" if is_input else "modify a copy; only the optimizer may change parameters"
    line = changes.line or line_of_forward(module)
    return spec_error("side_effect", line, name, f"is {kind} modified in place", remedy)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum)


def check_returned(module: nn.Module, flat: list[Any]) -> None:
    """Raises SpecError for an object among a module's results in which tensors would not be found."""
    for value in flat:
        if not isinstance(value, (Tensor, *_PLAIN)):
            rule = "is returned, but is neither a tensor nor a plain value"
            remedy = "return tensors or tuples, lists and dicts of them, or use torch.export.register_dataclass"
            raise spec_error("not_capturable", line_of_forward(module), type(value).__name__, rule, remedy)


def opaque(node: fx.Node, value: Any) -> SpecError:
    """The refusal for an operator's argument that is an object."""
    line = next((user.meta["line"] for user in node.users if user.meta.get("line")), node.name)
    if isinstance(value, torch.Generator):
        rule = "is a random generator, which a program cannot use"
        remedy = "omit it: torch.rand is keyed by seed, step and position"
        return spec_error("not_capturable", line, "generator", rule, remedy)
    rule, remedy = "is an object of this process, which a program cannot use", "compute with tensors"
    return spec_error("not_capturable", line, type(value).__name__, rule, remedy)


def effect(node: fx.Node) -> SpecError:
    """The refusal for an operator with a side effect."""
    line = node.meta.get("line") or node.name
    rule = "has a side effect that a program would not repeat"
    remedy = "leave collectives to the plan, or use sharding.manual"
    return spec_error("side_effect", line, str(node.args[1]), rule, remedy)
