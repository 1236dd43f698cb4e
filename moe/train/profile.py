"""torch profiler traces of selected steps, in the job's storage, for Perfetto and Chrome."""

import gzip
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from moe.parallel import Layout
from moe.parallel.accelerator import accelerator
from moe.spec.train import ProfileSpec
from moe.storage.folder import Folder
from moe.train.recorder import Recorder

FOLDER = "profile"


class StepProfile:
    """Traces the steps that the spec selects, on every rank. A failed trace does not fail the run."""

    def __init__(self, spec: ProfileSpec | None, folder: Folder, layout: Layout, recorder: Recorder) -> None:
        self._spec, self._folder, self._layout, self._recorder = spec, folder, layout, recorder
        self._profiler: torch.profiler.profile | None = None
        self._first = self._last = 0

    @contextmanager
    def trace_step(self, step: int) -> Iterator[None]:
        """Context of one step, counted from 1."""
        if self._spec is None:
            yield
            return
        end = self._spec.from_step + self._spec.num_steps
        if self._profiler is None and self._spec.from_step <= step < end:
            self._begin(step)
        with record_function(f"step {step}"):
            yield
        self._last = step
        if step == end - 1:
            self.close()

    def close(self) -> None:
        """Write the trace, even if the run ends before the last selected step."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        name = f"steps-{self._first}-{self._last}.rank-{self._layout.rank}.json.gz"
        try:
            accelerator(self._layout.device).synchronize()
            profiler.stop()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(path))
                self._folder.write(f"{FOLDER}/{name}", gzip.compress(path.read_bytes()))
        except (OSError, RuntimeError) as error:
            self._recorder.log("warning", f"lost the trace of steps {self._first} to {self._last}: {error}")
            return
        if self._layout.rank == 0:
            message = f"traced steps {self._first} to {self._last}: {self._folder.url_of(FOLDER)}"
            self._recorder.log("info", message)

    def _begin(self, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if self._layout.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._first = self._last = step
        accelerator(self._layout.device).synchronize()  # earlier steps' kernels are not traced
        profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        try:
            profiler.start()
        except RuntimeError as error:
            self._recorder.log("warning", f"steps from {step} on are not traced: {error}")
            self._spec = None
            return
        self._profiler = profiler
