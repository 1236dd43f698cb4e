"""Registered tensors that a forward pass reassigns: new values are written into buffers; parameters are refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe.spec import Problem, SpecError


@contextmanager
def written_back(module: nn.Module, line_of: Callable[[str], str]) -> Iterator[None]:
    """Context in which code may reassign buffers (`self.mean = 0.9 * self.mean + ...`): at its end the new values are
    written into the registered buffers. Raises SpecError, naming the line, for parameters, and for buffers whose shape
    or dtype changes."""
    originals = [
        (path, submodule, dict(submodule._parameters), dict(submodule._buffers))
        for path, submodule in module.named_modules()
    ]
    yield
    problems: list[Problem] = []
    for path, submodule, parameters, buffers in originals:
        prefix = f"{path}." if path else ""
        for tensors, old_tensors, write in (
            (submodule._parameters, parameters, None),
            (submodule._buffers, buffers, _write),
        ):
            for name in list(dict.fromkeys((*tensors, *old_tensors))):
                tensor, old_tensor = tensors.get(name), old_tensors.get(name)
                if tensor is old_tensor:
                    continue
                problems += _problem(line_of(name), prefix + name, old_tensor, tensor, write is not None)
                if name in old_tensors:
                    tensors[name] = old_tensor
                else:
                    del tensors[name]
                if write is not None and not problems:
                    write(old_tensor, tensor)
    if problems:
        raise SpecError(problems)


def _write(buffer: Any, value: Any) -> None:
    with torch.no_grad():
        buffer.copy_(value.detach())


def _problem(
    line: str, name: str, old_tensor: Tensor | None, new_tensor: Tensor | None, is_buffer: bool
) -> Iterator[Problem]:
    if not is_buffer:
        rule = "is a parameter reassigned in forward; optimizers would keep the old one"
        remedy = "assign the result to another name"
        yield Problem("side_effect", line, name, rule, remedy)
        return
    old_text, new_text = (
        "nothing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}" for tensor in (old_tensor, new_tensor)
    )
    if old_text != new_text:
        rule = f"is a buffer reassigned in forward from {old_text} to {new_text}"
        remedy = "register it with its final shape and dtype"
        yield Problem("side_effect", line, name, rule, remedy)
