"""The user's lines: which one each operator of a captured graph comes from, and which one an error does."""

import dis
import importlib
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
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

from moe.sharding import torch_private

F = TypeVar("F", bound=Callable[..., Any])

_BEGINNINGS: set[CodeType] = set()

_TORCH = torch.__path__[0] + "/"
_CHECKING = (f"{_TORCH}nn/functional.py", f"{_TORCH}distributions/")
_STANDARD = sysconfig.get_paths()["stdlib"]
_HERE = str(Path(__file__).parent) + "/"

_IMPORT = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]
_MODES = ("__torch_function__", "__torch_dispatch__")


BLOCK = "repeated block"
"""Key in a node's meta: the path of the block that the node is within, if any. `recompute` computes blocks again."""

REGION = "checkpointed"
"""Key in a node's meta: the user's call of `torch.utils.checkpoint` that the node is within, to be recomputed."""

_CURRENT: ContextVar["Lines | None"] = ContextVar("lines", default=None)


class Lines(TorchFunctionMode):
    """Marks the nodes of every function of torch with the line of the user's that called it, and with the path of the
    innermost module that was being called, and with the user's checkpointed call."""

    def __init__(self, mark: Callable[[dict[str, str] | None], None], module: nn.Module) -> None:
        super().__init__()
        self._mark = mark
        self._num_regions, self._region = 0, ""
        self._paths = {id(each): path for path, each in module.named_modules()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        marks = {"block": self._path_of(frame)}
        if where := line_of(frame):
            marks["where"] = where
        if self._region:
            marks[REGION] = self._region
        self._mark(marks)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> "Lines":
        self._token = _CURRENT.set(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _CURRENT.reset(self._token)

    @contextmanager
    def _within_region(self) -> Iterator[None]:
        if self._region:  # the outer call computes all of it again
            yield
            return
        self._num_regions += 1
        self._region = str(self._num_regions)
        try:
            yield
        finally:
            self._region = ""

    def _path_of(self, frame: FrameType | None) -> str:
        """Of the module whose method is nearest."""
        while frame is not None:
            if (path := self._paths.get(id(frame.f_locals.get("self")))) is not None:
                return path
            frame = frame.f_back
        return ""


def checkpointed() -> AbstractContextManager[None]:
    """Context whose nodes are marked as recomputed in the backward pass."""
    lines = _CURRENT.get()
    return nullcontext() if lines is None else lines._within_region()


def beginning(forward: F) -> F:
    """Mark a function behind which is nothing of the module's: all of its code in between is torch's, as of a
    `nn.Sequential`."""
    _BEGINNINGS.add(forward.__code__)
    return forward


@cache
def short(filename: str) -> str:
    """As seen from the present folder, or from where packages are installed: the same on every machine."""
    for folder in sorted((str(Path.cwd()), *sys.path), key=len, reverse=True):
        if folder and filename.startswith(f"{folder.rstrip('/')}/"):
            return filename[len(folder.rstrip("/")) + 1 :]
    return filename


def is_library(filename: str) -> bool:
    """Whether code is torch's, Python's own or of this package: none of the user's."""
    is_standard = filename.startswith(_STANDARD) and "site-packages" not in filename
    return is_standard or filename.startswith((_TORCH, _HERE, "<"))


def line_of_forward(module: nn.Module) -> str:
    """Where the module's code stands; its class where that cannot be told."""
    code = getattr(unwrap(type(module).forward), "__code__", None)
    if code is None or is_library(code.co_filename):
        return type(module).__name__
    return f"{short(code.co_filename)}:{code.co_firstlineno}"


def line_of(frame: FrameType | None) -> str:
    """The user's line that a frame, or the nearest that called it, is at; none where there is nothing of the user's."""
    while frame is not None and frame.f_code not in _BEGINNINGS:
        code = frame.f_code
        if not is_library(code.co_filename) and code.co_name not in _MODES:
            return f"{short(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_importing(frame: FrameType | None) -> bool:
    """Whether a frame is of the first import of a module within forward."""
    while frame is not None and frame.f_code not in _BEGINNINGS:
        if frame.f_code is _IMPORT:
            return True
        frame = frame.f_back
    return False


def note_blocks(module: nn.Module, graph: fx.Graph) -> None:
    """Set `BLOCK` of the operators of a module's graph. A block is a member of the outermost list of modules that has
    two members of one class: `layers.3` of `layers.3.moe.shared`, and `0.layers.3` where all of a network is one member
    of a list. Where no list on a module's path has two, it is the member of the outermost one."""
    numbered: dict[str, list[type[nn.Module]]] = defaultdict(list)
    for path, member in module.named_modules(remove_duplicate=False):
        owner, _, name = path.rpartition(".")
        if name.isdecimal():
            numbered[owner].append(type(member))
    lists_of_blocks = {path for path, classes in numbered.items() if len(set(classes)) < len(classes)}
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta[BLOCK] = _block_of(node.meta.get("block") or "", lists_of_blocks)


def _block_of(path: str, lists_of_blocks: Collection[str]) -> str | None:
    names = path.split(".")
    members = [at for at, name in enumerate(names) if name.isdecimal()]
    blocks = [at for at in members if ".".join(names[:at]) in lists_of_blocks]
    at = next(iter(blocks or members), None)
    return None if at is None else ".".join(names[: at + 1])


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
            node.meta[REGION] = found.get(REGION)


def user_line(error: BaseException) -> str:
    """The innermost line of the user's in an error's traceback. Modes, through which every function of torch goes, are
    none."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code.co_filename) and code.co_name not in _MODES:
            found = f"{short(code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def called_at(error: BaseException) -> str:
    """The function of `torch.nn.functional` or `torch.distributions` an error came up in, where the innermost line
    of the user's called it."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code.co_filename) and code.co_name not in _MODES:
            found = ""
        elif not found and code.co_filename.startswith(_CHECKING):
            found = code.co_qualname
        trace = trace.tb_next
    return found


def line_named(codes: Iterable[CodeType], name: str) -> str:
    """The first line of functions that sets a name, or else one that names it."""
    named = ""
    for code in codes:
        for each in dis.get_instructions(code):
            if (
                each.argval == name
                and each.opname.startswith(("STORE_", "DELETE_", "LOAD_"))
                and each.positions
            ):
                line = f"{short(code.co_filename)}:{each.positions.lineno}"
                if not each.opname.startswith("LOAD_"):
                    return line
                named = named or line
    return named
