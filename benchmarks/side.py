"""One side of `benchmarks.against`: times cases with the package on PYTHONPATH.

It runs by path, without this folder's package, and is the only module that knows the interfaces of several commits:
`_layer` and `_demo_step` list ways to call a commit's package, newest first. If none works, it reports what is lacking.

It reads lines of JSON and answers each with one line: a case with what is lacking (or null), then a round's number with
its seconds. It ends at the end of its input.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Round = Callable[[int], float]
"""Returns the seconds of the round of this number."""
Prepare = Callable[[Any], tuple[Any, dict[str, Any]]]
"""Returns from a job's spec the first argument of `train` and keyword arguments for its data."""
_LACKING = (ImportError, AttributeError, TypeError)


class EndOfRequests(Exception):
    """The input has no more requests."""


def _layer(case: dict[str, Any]) -> Iterator[Callable[[], Round]]:
    """Forward and backward passes of one layer as it is trained, over tokens drawn for each round."""
    import torch

    dtype = getattr(torch, case["dtype"])

    def passes(layer: Any, begin_step: Callable[[], None]) -> Round:
        with torch.no_grad():
            for parameter in layer.parameters():  # the same values on both sides, by shape only
                shape, generator = parameter.shape, torch.Generator().manual_seed(parameter.numel())
                parameter.copy_(torch.randn(shape, generator=generator) * shape[-2 if len(shape) > 1 else 0] ** -0.5)

        def run(number: int) -> float:
            generator = torch.Generator().manual_seed(number)
            shape = (case["tokens"], case["spec"]["model_dim"])
            x, gradient = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            seconds = 0.0
            for _ in range(case["passes"]):
                x = x.detach().requires_grad_()
                began = time.perf_counter()
                layer(x)[0].backward(gradient)
                seconds += time.perf_counter() - began
                begin_step()
            return seconds / case["passes"]

        return run

    def by_local_parameters() -> Round:
        from moe.parallel import local_parameters

        return with_buffers(local_parameters)

    def by_held_parameters() -> Round:
        from moe.parallel import held_parameters  # type: ignore[attr-defined]

        return with_buffers(held_parameters)

    def with_buffers(parameters_of: Callable[[Any], Any]) -> Round:
        from moe import MoELayer, MoESpec, parallel
        from moe.experts import stored_or_measured
        from moe.parallel import Layout, keep_buffers, values_changed

        discard_gradients = getattr(parallel, "discard_gradients", None) or parallel.forget_gradients

        layer = MoELayer(MoESpec(**case["spec"]), layer=1)
        parameters = parameters_of(layer)
        keep_buffers(parameters, Layout.single())
        layer.experts.costs = stored_or_measured(layer.experts.w_in.detach().to(dtype), Path(case["folder"]))

        def begin_step() -> None:
            values_changed(parameters)
            discard_gradients(parameters)

        return passes(layer, begin_step)

    yield by_local_parameters
    yield by_held_parameters


def _demo_step(case: dict[str, Any]) -> Iterator[Callable[[], Round]]:
    """Steps of the demo's own training on one worker, data and records included."""

    def by_task() -> Round:
        from moe.tasks.build import build_task
        from moe.train.recorder import MemoryRecorder

        def prepare_task(spec: Any) -> tuple[Any, dict[str, Any]]:
            task = build_task(spec)
            return task, {"data": task.prepare(case["cache"])}

        return by_layout(prepare_task, MemoryRecorder)

    def by_folders() -> Round:
        from moe.data.pairs import prepare
        from moe.train.recorder import MemoryRecorder

        return by_layout(of_spec(prepare), MemoryRecorder)

    def in_one_folder() -> Round:
        from moe.train.record import MemoryRecorder

        from moe.data import prepare

        return by_layout(of_spec(prepare), MemoryRecorder)

    def of_spec(prepare: Callable[..., Any]) -> Prepare:
        return lambda spec: (spec, {"prepared": prepare(spec.data, spec.model, case["cache"])})

    def by_layout(prepare: Prepare, recorder: type) -> Round:
        from moe.parallel import Layout
        from moe.plan import Cluster, plan_job
        from moe.spec import ParallelSpec, ResourcesSpec, read_job
        from moe.train.control import Control
        from moe.train.loop import train

        spec = read_job(case["job"])
        spec = spec.model_copy(update={"resources": ResourcesSpec(num_workers=1), "parallel": ParallelSpec()})
        plan = plan_job(spec, Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=8 << 30))
        (task_or_spec, data), folder = prepare(spec), Path(case["folder"])

        def run(control: Control) -> None:
            train(
                task_or_spec, plan, Layout.build(plan), **data, storage=str(folder / str(os.getpid())),
                cache=folder, attempt=1, group=0, recorder=recorder(), control=control,
            )  # fmt: skip

        return _in_turns(run, Control, case["steps"])

    yield by_task
    yield by_folders
    yield in_one_folder


def _in_turns(run: Callable[[Any], None], control: type, steps: int) -> Round:
    """The first round starts the run; later rounds are answered from within it, when the loop polls its control."""

    def first(number: int) -> float:
        class Turns(control):  # type: ignore[misc, valid-type]
            num_steps, began = 0, time.perf_counter()

            def poll(self) -> None:
                if self.num_steps and self.num_steps % steps == 0:
                    _say(seconds=(time.perf_counter() - self.began) / steps)
                    _read_request()
                if self.num_steps % steps == 0:
                    self.began = time.perf_counter()
                self.num_steps += 1

            requested = poll  # name in older commits

        run(Turns())
        raise RuntimeError("the demo ended before its rounds did")

    return first


CASES = {"layer": _layer, "demo": _demo_step}


def _read_request() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        raise EndOfRequests
    request: dict[str, Any] = json.loads(line)
    return request


def _say(**answer: Any) -> None:
    print(json.dumps(answer), file=_ANSWERS, flush=True)


def _ready(case: dict[str, Any]) -> Round | None:
    """Report whether this commit can run the case; returns its round by the first way that works."""
    lacking = []
    for way in CASES[case["kind"]](case):
        try:
            answer = way()
        except _LACKING as error:
            lacking.append(f"{type(error).__name__}: {error}")
        else:
            _say(lacking=None)
            return answer
    _say(lacking="; ".join(lacking))
    return None


def main() -> None:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with suppress(EndOfRequests):
        run = _ready(_read_request())
        while run is not None:
            _say(seconds=run(_read_request()["round"]))


if __name__ == "__main__":
    _ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with answers
    main()
