"""Lines of the user's code: where an operator of a captured graph comes from, and where an error was raised."""

import dis
import importlib
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from inspect import unwrap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from moe import overrides
from moe.sharding import torch_private

F = TypeVar("F", bound=Callable[..., Any])

_BEGINNINGS: set[CodeType] = set()

_TORCH = torch.__path__[0] + "/"
_CHECKING = (f"{_TORCH}nn/functional.py", f"{_TORCH}distributions/")
_STANDARD = sysconfig.get_paths()["stdlib"]
_PACKAGE = (str(Path(__file__).parent) + "/", overrides.__file__)

_IMPORT = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]
_MODES = ("__torch_function__", "__torch_dispatch__")


BLOCK = "repeated block"
"""Key in a node's meta: the path of the block that contains the node, if any. `recompute` computes blocks again."""

REGION = "checkpointed"
"""Key in a node's meta: the user's call of `torch.utils.checkpoint` that contains the node, which is recomputed."""

_CURRENT: ContextVar["LineMarker | None"] = ContextVar("lines", default=None)


class LineMarker(TorchFunctionMode):
    """Marks the nodes of each call of a torch function with the user's line, the path of the innermost module on the
    call stack, and the user's call of `torch.utils.checkpoint`."""

    def __init__(self, mark: Callable[[dict[str, str] | None], None], module: nn.Module) -> None:
        super().__init__()
        self._mark = mark
        self._num_regions, self._region = 0, ""
        self._paths: dict[int, list[str]] = defaultdict(list)
        for path, member in module.named_modules(remove_duplicate=False):
            self._paths[id(member)].append(path)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        marks = {"block": self._path_of(frame)}
        if line := line_of(frame):
            marks["line"] = line
        if self._region:
            marks[REGION] = self._region
        self._mark(marks)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> "LineMarker":
        self._token = _CURRENT.set(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _CURRENT.reset(self._token)

    @contextmanager
    def _mark_region(self) -> Iterator[None]:
        if self._region:  # the outer call recomputes the inner one, too
            yield
            return
        self._num_regions += 1
        self._region = str(self._num_regions)
        try:
            yield
        finally:
            self._region = ""

    def _path_of(self, frame: FrameType | None) -> str:
        """Path of the innermost module whose method is on the call stack; of several paths of a module, the one in
        the module that called it, or the first."""
        while frame is not None:
            paths = self._paths.get(id(frame.f_locals.get("self")))
            if paths is not None and len(paths) == 1:
                return paths[0]
            if paths is not None:
                caller = self._path_of(frame.f_back)
                inner = (path for path in paths if path == caller or path.startswith(f"{caller}."))
                return next(inner, paths[0])
            frame = frame.f_back
        return ""


def recomputed_region() -> AbstractContextManager[None]:
    """Context whose nodes are marked as recomputed in the backward pass."""
    lines = _CURRENT.get()
    return nullcontext() if lines is None else lines._mark_region()


def beginning(forward: F) -> F:
    """Decorator of a function that calls the user's module: its callers are not the module's code."""
    _BEGINNINGS.add(forward.__code__)
    return forward


@cache
def short(filename: str) -> str:
    """Path relative to the working directory or to the folder of installed packages: the same on every machine."""
    for folder in sorted((str(Path.cwd()), *sys.path), key=len, reverse=True):
        if folder and filename.startswith(f"{folder.rstrip('/')}/"):
            return filename[len(folder.rstrip("/")) + 1 :]
    return filename


def is_library(filename: str) -> bool:
    """Whether code belongs to torch, Python's standard library or this package, rather than to the user."""
    is_standard = filename.startswith(_STANDARD) and "site-packages" not in filename
    return is_standard or filename.startswith((_TORCH, *_PACKAGE, "<"))


def line_of_forward(module: nn.Module) -> str:
    """The first line of the module's forward; the name of its class where the line is unknown."""
    code = getattr(unwrap(type(module).forward), "__code__", None)
    if code is None or is_library(code.co_filename):
        return type(module).__name__
    return f"{short(code.co_filename)}:{code.co_firstlineno}"


def line_of(frame: FrameType | None) -> str:
    """The user's line in a frame or in the nearest of its callers; empty where there is no user code."""
    while frame is not None and frame.f_code not in _BEGINNINGS:
        code = frame.f_code
        if not is_library(code.co_filename) and code.co_name not in _MODES:
            return f"{short(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_importing(frame: FrameType | None) -> bool:
    """Whether forward is importing a module in this frame or in one of its callers."""
    while frame is not None and frame.f_code not in _BEGINNINGS:
        if frame.f_code is _IMPORT:
            return True
        frame = frame.f_back
    return False


def note_lines(graph: fx.Graph) -> None:
    """Set the user's line, the module and the `REGION` of each operator. Those of a gradient operator are its forward
    operator's."""
    marks = {
        node.meta.get("seq_nr"): torch_private.marks_of(node)
        for node in reversed(graph.nodes)
        if node.op == "call_function" and torch_private.marks_of(node)
    }
    for node in graph.nodes:
        if node.op == "call_function":
            node_marks = torch_private.marks_of(node) or marks.get(node.meta.get("seq_nr"), {})
            node.meta["line"], node.meta["block"] = node_marks.get("line"), node_marks.get("block")
            node.meta[REGION] = node_marks.get(REGION)


def user_line(error: BaseException) -> str:
    """The innermost line of the user's code in an error's traceback, without torch's function and dispatch modes."""
    line, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code.co_filename) and code.co_name not in _MODES:
            line = f"{short(code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def checking_function(error: BaseException) -> str:
    """The function of `torch.nn.functional` or `torch.distributions` that the innermost line of the user's code called
    and that raised an error; empty where there is none."""
    function, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code.co_filename) and code.co_name not in _MODES:
            function = ""
        elif not function and code.co_filename.startswith(_CHECKING):
            function = code.co_qualname
        trace = trace.tb_next
    return function


def line_of_name(codes: Iterable[CodeType], name: str) -> str:
    """The first line of functions that sets or deletes a name, or else the first one that reads it."""
    first_read = ""
    for code in codes:
        for instruction in dis.get_instructions(code):
            if (
                instruction.argval == name
                and instruction.opname.startswith(("STORE_", "DELETE_", "LOAD_"))
                and instruction.positions
            ):
                line = f"{short(code.co_filename)}:{instruction.positions.lineno}"
                if not instruction.opname.startswith("LOAD_"):
                    return line
                first_read = first_read or line
    return first_read
