"""Event files of TensorBoard, without torch or TensorFlow."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service.tracker.messages import RunEnd, TrackedRun
from service.tracker.run import RewindableRun
from service.tracker.values import StepValues

POSITION = "position.json"
"""File with the last step whose events are on disk. Later events, of a killed process, are purged."""


class TensorBoardRun(RewindableRun):
    """A folder of event files. Readers discard purged steps, by the event that each new file begins with."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._folder = Path(run.folder) / "tensorboard" / f"{run.name}-{run.job_id}"
        self._writer: Any = None

    def open(self) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.last_step = self._read_position()
        self._begin_file(0 if self.last_step is None else self.last_step + 1)
        if self.last_step is None:
            spec = json.dumps(self.run.spec, indent=2)
            self._add(0, time.time(), [_text("spec", [f"```json\n{spec}\n```"])])
            if self.run.labels:
                rows = [f"{key}: {value}" for key, value in self.run.labels.items()]
                self._add(0, time.time(), [_text("labels", rows)])
            self._writer.flush()
        return str(self._folder)

    def write(self, points: Sequence[StepValues]) -> None:
        for point in points:
            summaries = [_scalar(name, value) for name, value in point.scalars.items()]
            summaries += [
                _text(f"samples/{number}", [f"**{prompt}**", completion])
                for number, (prompt, completion) in enumerate(point.samples, start=1)
            ]
            self._add(point.step, point.time_s, summaries)
        self._flush_through(max(point.step for point in points))

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._write_position(step - 1)
        self._begin_file(step)

    def write_system(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._add(step, time_s, [_scalar(name, value) for name, value in values.items()])

    def set_waiting(self, waiting: bool) -> None:
        """Event files have no state of a run."""

    def end(self, end: RunEnd) -> None:
        summaries = [_scalar(name, value) for name, value in end.scores.items()]
        summaries.append(_text("outcome", [f"{end.outcome} at step {end.step}", end.reason]))
        self._add(end.step, end.time_s, summaries)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _begin_file(self, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._wait_for_next_second()
        self._writer = EventFileWriter(str(self._folder), max_queue_size=1000, flush_secs=3600)
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=purge_step, session_log=start))
        self._writer.flush()

    def _wait_for_next_second(self) -> None:
        """Wait until a new file's name, which begins with the time in seconds, sorts after those of all others, since
        readers take files in the order of their names."""
        newest = max((path.name.split(".")[3] for path in self._folder.glob("events.out.tfevents.*")), default="0")
        while int(time.time()) <= int(newest):
            time.sleep(0.05)

    def _add(self, step: int, time_s: float, summaries: list[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(wall_time=time_s, step=step, summary=Summary(value=summaries)))

    def _flush_through(self, step: int) -> None:
        self._writer.flush()
        if self.last_step is None or step > self.last_step:
            self._write_position(step)

    def _write_position(self, step: int) -> None:
        draft = self._folder / f".{POSITION}"
        draft.write_text(json.dumps({"step": step}))
        os.replace(draft, self._folder / POSITION)
        self.last_step = step

    def _read_position(self) -> int | None:
        try:
            return int(json.loads((self._folder / POSITION).read_text())["step"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None


def _scalar(name: str, value: float) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary.Value(tag=name, simple_value=value)


def _text(name: str, paragraphs: Sequence[str]) -> Any:
    """Summary of the text plugin: Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto

    plugin = SummaryMetadata.PluginData(plugin_name="text")
    tensor = TensorProto(dtype="DT_STRING", string_val=["\n\n".join(paragraphs).encode()])
    return Summary.Value(tag=f"{name}/text_summary", metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
