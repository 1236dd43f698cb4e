"""A device of its own type that computes on the CPU, for what cannot be tested without a GPU.

Torch's Python backend provides the type `rehearsal`. Its tensors wrap CPU tensors, and every operation on them passes
`RehearsalTensor.__torch_dispatch__`, which refuses operands on two devices, as CUDA does, and counts what the host
would wait for on a GPU. Collectives run over gloo, on the wrapped tensors. A process registers the device before its
first backward pass, when autograd starts its threads, and exits without cleanup, which those threads would not survive.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.rehearsal.recording import Recording

NAME = "rehearsal"
aten = torch.ops.aten

_WAITS = {
    aten._local_scalar_dense.default: "item",
    aten.is_nonzero.default: "bool",
    aten.equal.default: "equal",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.bincount.default: "bincount",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.unique_consecutive.default: "unique",
}
"""Operations for whose result, or its size, the host waits on CUDA."""
_FILLED = (
    "arange.default", "arange.start", "arange.start_step", "empty.memory_format", "empty_strided.default",
    "eye.default", "full.default", "linspace.default", "ones.default", "rand.default", "randint.default",
    "randint.low", "randn.default", "randperm.default", "scalar_tensor.default", "zeros.default",
)  # fmt: skip
"""Factories: they have no operand that would lead them here."""
_WITHOUT_KERNEL = (
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::_unsafe_view", "aten::resize_",
)  # fmt: skip
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class TwoDevices(RuntimeError):
    """Operands on two devices, or made on the default device by oversight."""


class HostCounts:
    """What the host does for the device, by kind and by the line of this project that caused it."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._listening = 0

    @contextmanager
    def count(self) -> Iterator[Counter[tuple[str, str]]]:
        """Count within the context."""
        self._listening += 1
        before = self.counts.copy()
        counts: Counter[tuple[str, str]] = Counter()
        try:
            yield counts
        finally:
            self._listening -= 1
            counts.update(self.counts - before)

    def add(self, kind: str) -> None:
        if self is WAITS and Recording.current is not None:
            raise RuntimeError(f"{kind} is not permitted while a graph is recorded, {_asked_by()}")
        if self._listening:
            self.counts[kind, _asked_by()] += 1


class DeviceTime:
    """Processor seconds in which the process acts as the device: all others are the host's."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_operations = 0
        """Operations submitted so far."""
        self._is_measuring = False

    @contextmanager
    def measure(self) -> Iterator[None]:
        if self._is_measuring:
            yield
            return
        self.num_operations += 1
        self._is_measuring, began = True, time.process_time()
        try:
            yield
        finally:
            self._is_measuring = False
            self.seconds += time.process_time() - began


DEVICE_TIME = DeviceTime()
WAITS, LAUNCHES = HostCounts(), HostCounts()
"""Waits of the host, and kernels of torch's operations, one each, by operation."""
BACKLOGS: list[tuple[str, int]] = []
"""For each wait for an event, by whom, and the operations that the device had left to do afterwards."""


def _asked_by() -> str:
    """`file:line` of the innermost frame in the package, below the interface of devices."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(f"{ROOT}/moe/") and not path.endswith("/parallel/accelerator.py"):
            return f"{path[len(ROOT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd"


class RehearsalTensor(Tensor):
    """Tensor of the device, which wraps a CPU tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "RehearsalTensor":
        tensor = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=torch.device(NAME, 0), requires_grad=False,
        )  # fmt: skip
        tensor.inner = inner
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RehearsalTensor({self.inner!r})"

    def tolist(self) -> Any:
        WAITS.add("tolist")
        return self.inner.tolist()

    def record_stream(self, stream: Any) -> None: ...

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DEVICE_TIME.measure():
            return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the wrapped tensors; its result is on the device, unless it was requested on the CPU."""
    flat, spec = tree_flatten((args, kwargs))
    wrappers = [value for value in flat if isinstance(value, RehearsalTensor)]
    host_tensors = [value for value in flat if isinstance(value, Tensor) and not isinstance(value, RehearsalTensor)]
    to_host = _goes_to_host(func, args, kwargs)
    _check(func, args, host_tensors)
    _count(func, args, kwargs, to_host)
    if _is_kernel(func):
        LAUNCHES.add(func._schema.name.removeprefix("aten::"))
    inner = [_unwrap(value) for value in flat]
    owners = {id(wrapper.inner): wrapper for wrapper in wrappers}
    arguments, keywords = tree_unflatten(inner, spec)
    if to_host and _is_copied_later(func, args):
        return _copy_later(*arguments[:2])
    result = _compute(func, arguments, keywords)
    for wrapper in wrappers:
        assert wrapper.shape == wrapper.inner.shape, (
            f"{func} has given an operand another shape, which its wrapper lacks"
        )
    if to_host:
        return result
    return tree_map(lambda value: _wrap(value, owners), result)


def _compute(func: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
    """Call an operator on wrapped tensors, as a part of the graph that is recorded, if any."""
    if Recording.current is None:
        return func(*arguments, **keywords)
    return Recording.current.run(func, arguments, keywords, allocates_only=func._schema.name in _WITHOUT_KERNEL)


def _unwrap(value: Any) -> Any:
    if isinstance(value, RehearsalTensor):
        return value.inner
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _wrap(value: Any, owners: dict[int, RehearsalTensor]) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, RehearsalTensor):
        return value
    return owners.get(id(value)) if id(value) in owners else RehearsalTensor(value)


def _goes_to_host(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if func is aten.copy_.default:
        return not isinstance(args[0], RehearsalTensor)
    device = kwargs.get("device")
    return func is aten._to_copy.default and device is not None and torch.device(device).type == "cpu"


def _check(func: Any, args: Any, host_tensors: list[Tensor]) -> None:
    """Raise TwoDevices, except where CUDA accepts CPU tensors: copies, scalars, indices."""
    if func in (aten.copy_.default, aten._to_copy.default) or func.namespace == "c10d":
        return
    if func in _INDEXED and all(isinstance(value, RehearsalTensor) for value in (args[0], *args[2:3])):
        return
    wrong = [tensor for tensor in host_tensors if tensor.dim() or tensor.device.type != "cpu"]
    if wrong:
        raise TwoDevices(
            f"{func}: an operand of shape {tuple(wrong[0].shape)} lies on {wrong[0].device}, others on {NAME}; "
            f"asked by {_asked_by()}"
        )


def _count(func: Any, args: Any, kwargs: dict[str, Any], to_host: bool) -> None:
    if func is aten.copy_.default and not _is_here(args[1]) and Recording.current is not None:
        raise RuntimeError(f"host memory is copied while a graph is recorded, {_asked_by()}")
    if to_host:
        if not _is_copied_later(func, args):
            WAITS.add("copy to the host")
    elif func is aten.copy_.default and not _is_ready(args[1], *args[2:], **kwargs):
        WAITS.add("copy from the host")
    elif func in _INDEXED and any(isinstance(index, Tensor) and not _is_here(index) for index in args[1]):
        WAITS.add("index of the host")
    elif func in _WAITS:
        WAITS.add(_WAITS[func])
    elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        WAITS.add("repeat_interleave")
    elif func in _INDEXED and any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]):
        WAITS.add("index by a mask")


def _is_kernel(func: Any) -> bool:
    """Whether an operation computes or moves values: none that only makes a view or allocates."""
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
    return func.namespace == "aten" and not is_view and func._schema.name not in _WITHOUT_KERNEL


def _is_here(tensor: Tensor) -> bool:
    return isinstance(tensor, RehearsalTensor)


def _is_ready(source: Tensor, non_blocking: bool = False) -> bool:
    """Whether a copy to the device returns at once: CUDA waits for all queued work, unless the copy is non-blocking and
    from pinned memory."""
    return _is_here(source) or (non_blocking and getattr(source, "pinned", False))


def _is_copied_later(func: Any, args: Any) -> bool:
    """Whether a copy to the host returns at once: one that is non-blocking, to pinned memory."""
    return func is aten.copy_.default and len(args) > 2 and args[2] and getattr(args[0], "pinned", False)


_COPIES: list[Callable[[], object]] = []
"""Copies to the host since the last event that was recorded."""


def _copy_later(host: Tensor, source: Tensor) -> Tensor:
    """Copy when the next event that is recorded is waited for; values are undefined until then."""
    value = source.clone()
    _COPIES.append(lambda: host.copy_(value))
    return host.fill_(float("nan") if host.is_floating_point() else -1)


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    """`Tensor.pin_memory`, which is refused where torch has no GPU."""
    copy = tensor.clone()
    copy.pinned = True  # type: ignore[attr-defined]
    return copy


class _Module:
    """`torch.rehearsal`: the host is the device, so streams and events are nothing."""

    class Stream:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def wait_stream(self, stream: Any) -> None: ...

        def wait_event(self, event: Any) -> None: ...

        def synchronize(self) -> None: ...

        def record_event(self, event: Any = None) -> Any:
            return event or _Module.Event()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...

    class Event:
        """The host waits for the work before `record`. Copies to the host that began there are complete only then."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self._copies: list[Callable[[], object]] = []
            self._num_operations = 0

        def record(self, stream: Any = None) -> None:
            self._copies = _COPIES.copy()
            _COPIES.clear()
            self._num_operations = DEVICE_TIME.num_operations

        def wait(self, stream: Any = None) -> None: ...

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            BACKLOGS.append((_asked_by(), DEVICE_TIME.num_operations - self._num_operations))
            WAITS.add("event")
            while self._copies:
                self._copies.pop()()

        def elapsed_time(self, end_event: Any) -> float:
            return 0.0

    @staticmethod
    def current_stream(device: Any = None) -> Any:
        return _Module.Stream()

    default_stream = current_stream

    @staticmethod
    @contextmanager
    def stream(stream: Any) -> Iterator[None]:
        yield

    class CUDAGraph(Recording):
        def replay(self) -> None:
            with DEVICE_TIME.measure():
                super().replay()

    @staticmethod
    def graph(graph: Recording, *, pool: object, stream: Any, capture_error_mode: str) -> Recording:
        return graph

    @staticmethod
    def graph_pool_handle() -> object:
        return None

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return Recording.current is not None

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def set_device(device: Any) -> None: ...

    @staticmethod
    def synchronize(device: Any = None) -> None:
        WAITS.add("synchronize")

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None: ...

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return NAME

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16]


_LIBRARIES: list[Any] = []


def register() -> torch.device:
    """Register the device in this process and return it."""
    if not _LIBRARIES:
        backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
        library = torch.library.Library("aten", "IMPL")
        _LIBRARIES.append(library)
        for name in _FILLED:
            packet, _, overload = name.partition(".")
            library.impl(
                name.removesuffix(".default"), _factory(getattr(getattr(aten, packet), overload)), "PrivateUse1"
            )
        _reach_memory_within()
        library.impl("_copy_from", _copy_from, "PrivateUse1")
        Tensor.pin_memory = _pin_memory  # type: ignore[assignment, method-assign]
    return torch.device(NAME, 0)


def _reach_memory_within() -> None:
    """Let FSDP2, which frees and allocates the memory of gathered tensors, reach the wrapped tensors."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param

    for module in (_fsdp_param, _fsdp_collectives):
        for name in ("alloc_storage", "free_storage"):
            if hasattr(module, name):
                setattr(module, name, _on_inner(getattr(module, name)))


def _on_inner(function: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    return lambda tensor: function(_unwrap(tensor))


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy at the end of `torch.tensor`, which no `__torch_dispatch__` sees."""
    run(aten.copy_.default, (to, source, non_blocking), {})
    return to


def _factory(func: Any) -> Callable[..., Tensor]:
    def create(*args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("pin_memory", None)
        if _is_kernel(func):
            LAUNCHES.add(func._schema.name.removeprefix("aten::"))
        with DEVICE_TIME.measure():
            return RehearsalTensor(_compute(func, args, {**kwargs, "device": "cpu"}))

    return create
