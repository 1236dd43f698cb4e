"""The user's lines: which one each operator of a captured graph comes from, and which one an error does."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from moe.sharding import torch_private

F = TypeVar("F", bound=Callable[..., Any])

_BEGINNINGS: set[CodeType] = set()

_TORCH = torch.__path__[0] + "/"
_HERE = str(Path(__file__).parent) + "/"

_MODES = ("__torch_function__", "__torch_dispatch__")


class Lines(TorchFunctionMode):
    """Marks the nodes of every function of torch with the line of the user's that called it, and with the path of the
    innermost module that was being called."""

    def __init__(self, mark: Callable[[dict[str, str] | None], None], module: nn.Module) -> None:
        super().__init__()
        self._mark = mark
        self._paths = {id(each): path for path, each in module.named_modules()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        block = self._path_of(frame)
        while frame is not None and _is_torch(frame.f_code.co_filename) and frame.f_code not in _BEGINNINGS:
            frame = frame.f_back
        marks = {"block": block}
        if frame is not None and frame.f_code not in _BEGINNINGS:
            marks["where"] = f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        self._mark(marks)
        return func(*args, **(kwargs or {}))

    def _path_of(self, frame: Any) -> str:
        """Of the module whose method is nearest."""
        while frame is not None:
            if (path := self._paths.get(id(frame.f_locals.get("self")))) is not None:
                return path
            frame = frame.f_back
        return ""


def beginning(forward: F) -> F:
    """Mark a function behind which is nothing of the module's: all of its code in between is torch's, as of a
    `nn.Sequential`."""
    _BEGINNINGS.add(forward.__code__)
    return forward


@cache
def short(filename: str) -> str:
    """As seen from the present folder, or from where packages are installed: the same on every machine."""
    for folder in (str(Path.cwd()), *sorted(sys.path, key=len, reverse=True)):
        if folder and filename.startswith(f"{folder.rstrip('/')}/"):
            return filename[len(folder.rstrip("/")) + 1 :]
    return filename


def _is_torch(filename: str) -> bool:
    return filename.startswith((_TORCH, _HERE, "<eval_with_key>", "<frozen"))


def note_lines(graph: fx.Graph) -> None:
    """Write down the user's line and the module that each operator comes from, of gradients those of the operator they
    are of."""
    marks = {
        node.meta.get("seq_nr"): torch_private.marks_of(node)
        for node in reversed(graph.nodes)
        if node.op == "call_function" and torch_private.marks_of(node)
    }
    for node in graph.nodes:
        if node.op == "call_function":
            found = torch_private.marks_of(node) or marks.get(node.meta.get("seq_nr"), {})
            node.meta["where"], node.meta["block"] = found.get("where"), found.get("block")


def user_line(error: BaseException) -> str:
    """The innermost line of the user's in an error's traceback. Modes, through which every function of torch goes, are
    none."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _is_torch(code.co_filename) and code.co_name not in _MODES:
            found = f"{short(code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
