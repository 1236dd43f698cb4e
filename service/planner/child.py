"""The process that plans a user's module: `python -m service.planner.child DESCRIPTOR`.

Reads a `Request` from standard input and writes a `PlannerAnswer` to the descriptor, since the user's code may print.
Sets resource limits before it imports the user's code, and finally kills all its child processes.
"""

import ctypes
import math
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moe.spec import Problem, SpecError, spec_error
from service.planner.request import JobRequest, ModuleRequest, PlannerAnswer, Request

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
SPARE_CPU_S = 10


class _OutOfMemory(Exception):
    """The memory limit was hit."""


def main() -> None:
    """Answer once and exit, whatever threads the user's code has left."""
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)
    request = Request.model_validate_json(sys.stdin.buffer.read())
    _limit(request)
    answer = _answer(request)
    with os.fdopen(answers, "w") as answer_file:
        answer_file.write(answer.model_dump_json())
    sys.stdout.flush()
    sys.stderr.flush()
    _end_children()
    os._exit(0)


def _limit(request: Request) -> None:
    """Set resource limits, and SIGKILL at the parent's death."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopts orphaned descendants
        if os.getppid() != request.parent_pid:
            os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if request.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (request.memory_bytes, request.memory_bytes))
    if request.timeout_s is not None:  # a limit without the parent's watch
        seconds = math.ceil(request.timeout_s * (os.cpu_count() or 1)) + SPARE_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def _answer(request: Request) -> PlannerAnswer:
    try:
        if request.job is not None:
            return _plan_job(request.job)
        assert request.module is not None
        return _plan_module(request.module)
    except SpecError as error:
        return PlannerAnswer(
            problems=tuple(problem.to_dict() | {"value": _to_plain(problem.value)} for problem in error.problems)
        )
    except _OutOfMemory as error:
        return PlannerAnswer(problems=(_too_large(request, str(error)).to_dict(),))


def _plan_job(request: JobRequest) -> PlannerAnswer:
    from moe.tasks.module.code import check_allowed

    check_allowed(request.spec, request.allowed_code)
    with _place_problems("model.build", request.spec.model.build):  # type: ignore[union-attr]
        from moe.tasks.module.planning import plan_module_job

        plan = plan_module_job(request.spec, request.cluster)
    return PlannerAnswer(plan=plan.model_dump(mode="json"))


def _plan_module(request: ModuleRequest) -> PlannerAnswer:
    with _place_problems("--module", request.build):
        from moe import sharding
        from moe.sharding.hints.hints import hint_from_plain
        from moe.tasks.module.build import build_on_meta, to_batch
        from moe.tasks.module.code import import_function

        hints = {name: hint_from_plain(hint, f"hints.{name}") for name, hint in request.hints.items()}
        sample = to_batch(import_function(request.sample, "--sample")())
        module = build_on_meta(import_function(request.build, "--module"), {}, 0, "--module", request.build)
        plan = sharding.plan(module, sample=sample, cluster=request.cluster, hints=hints)
    picture = _picture(plan) if request.picture else ""
    return PlannerAnswer(plan=plan.to_json(), explained=plan.explain(), picture=picture)


def _picture(plan: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.svg"
        plan.draw(path)
        return path.read_text()


@contextmanager
def _place_problems(path: str, code: str) -> Iterator[None]:
    """Convert the user code's exceptions into SpecError, with the line, or _OutOfMemory."""
    try:
        yield
    except SpecError:
        raise
    except BaseException as error:
        lines = str(error).strip().splitlines()
        words = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise _OutOfMemory(words) from error
        traceback.print_exc()
        frames = traceback.extract_tb(error.__traceback__)
        location = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        raise spec_error(
            "user_code", path, code, f"cannot be planned: {words}{location}", "correct the module's code"
        ) from error


def _too_large(request: Request, words: str) -> Problem:
    path, code = _path_and_code(request)
    limit = (
        "this machine has" if request.memory_bytes is None else f"planning may use (={request.memory_bytes:,} bytes)"
    )
    return Problem("does_not_fit", path, code, f"needs more memory than {limit}: {words[:200]}",
                   "create parameters and buffers with torch's own functions, which allocate nothing "
"during planning, or ask the operator to raise SHARDYARD_PLANNING_MEMORY_BYTES")  # fmt: skip


def _path_and_code(request: Request) -> tuple[str, str]:
    if request.job is not None:
        return "model.build", str(request.job.spec.model.build)  # type: ignore[union-attr]
    assert request.module is not None
    return "--module", request.module.build


def _to_plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _end_children() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


if __name__ == "__main__":
    main()
