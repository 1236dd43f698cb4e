"""Progress of a run, folded from its events; draws nothing."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import Any

from moe.records import CheckpointRecord, LayerRecord, PreparationRecord, StepRecord
from service.cli.view.printable import printable
from service.wire.events import Event
from service.wire.states import OVER

LOAD_WINDOW_STEPS = 20
"""Steps over which expert loads are summed, since one step is noisy."""
RATE_WINDOW_STEPS = 50
MAX_PROMPT_CHARS, MAX_COMPLETION_CHARS = 60, 300
"""End of a prompt, and beginning of its completion, that a line shows."""


@dataclass(frozen=True)
class ProgressLine:
    """A permanent line: a state change, a plan, a warning; samples have a line each below it."""

    time: datetime
    kind: str
    text: str


@dataclass(frozen=True)
class LayerLoad:
    """Distribution of an MoE layer's kept assignments over its experts."""

    layer: int
    load: tuple[float, ...]
    rejected: float
    dropped: float

    @property
    def shares(self) -> tuple[float, ...]:
        """Each expert's load as a multiple of an even share."""
        even = sum(self.load) / len(self.load) if self.load else 0.0
        return tuple(load / even if even else 0.0 for load in self.load)

    @property
    def num_unused(self) -> int:
        return sum(load == 0 for load in self.load)


@dataclass
class RunProgress:
    """State of a run. `take` processes an event and returns its permanent line, if any."""

    job_id: str
    name: str
    num_steps: int
    last_work: str = "evaluating"
    """Description of the work after the last step."""
    state: str = "queued"
    reason: str = ""
    attempt: int | None = None
    step: int = 0
    metric: StepRecord | None = None
    checkpoint_step: int | None = None
    latest_log: str = ""
    preparation: PreparationRecord | None = None
    """Progress of data preparation, until anything follows it."""
    last_event_id: int = 0
    state_since: datetime | None = None
    _recent: deque[tuple[int, datetime]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW_STEPS))
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW_STEPS))
    _layers: deque[tuple[LayerRecord, ...]] = field(default_factory=lambda: deque(maxlen=LOAD_WINDOW_STEPS))

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    def take(self, event: Event) -> ProgressLine | None:
        self.last_event_id = event.id
        if event.attempt is not None:
            self.attempt = max(self.attempt or 0, event.attempt)  # older records may arrive late
        match event.kind:
            case "state":
                return self._take_state(event)
            case "plan":
                return ProgressLine(event.time, "plan", _plan_in_words(event.data))
            case "metric":
                return None if event.superseded else self._take_metric(event)  # superseded: outdated
            case "checkpoint":
                self.checkpoint_step = CheckpointRecord.read(event.data).step
                return None  # shown as a figure: a line per checkpoint would push everything else off the screen
            case "log":
                return self._take_log(event)

    def _take_state(self, event: Event) -> ProgressLine:
        state = str(event.data["state"])
        if state != self.state or self.state_since is None:  # else only the reason is new
            self.state_since, self.latest_log, self.preparation = event.time, "", None
        self.state, self.reason = state, printable(str(event.data.get("reason") or ""))
        because = f": {self.reason}" if self.reason else ""
        return ProgressLine(event.time, "state", f"{self.state}{because}")

    def _take_metric(self, event: Event) -> ProgressLine | None:
        metric = StepRecord.read(event.data)
        if metric.step <= self.step:  # steps are repeated after a restart, so that old times do not tell the new pace
            self._recent.clear()
            self._layers.clear()
        self.step, self.metric, self.latest_log, self.preparation = metric.step, metric, "", None
        self._recent.append((metric.step, event.time))
        if metric.tokens_per_s is not None:
            self._rates.append(metric.tokens_per_s)
        self._layers.append(metric.layers)
        if not metric.samples:
            return None
        lines = (
            f"{printable(sample.prompt)[-MAX_PROMPT_CHARS:]} ⟶ {printable(sample.completion)[:MAX_COMPLETION_CHARS]}"
            for sample in metric.samples
        )
        return ProgressLine(event.time, "samples", "\n  ".join((f"step {metric.step:,}", *lines)))

    def _take_log(self, event: Event) -> ProgressLine | None:
        message = printable(str(event.data.get("message", "")))
        if str(event.data.get("level", "info")).lower() in ("warning", "error", "critical"):
            return ProgressLine(event.time, str(event.data["level"]).lower(), message)
        self.latest_log, self.preparation = message, preparation_of(event)
        return None

    @property
    def doing(self) -> str:
        """Last log line, or the work after the last step."""
        if self.latest_log or self.state != "running" or self.step < self.num_steps:
            return self.latest_log
        return f"all steps done; {self.last_work}"

    @property
    def seconds_left(self) -> float | None:
        """Time to the last step at the recent rate; None before two steps."""
        if len(self._recent) < 2 or self.step >= self.num_steps:
            return None
        (first, began), (last, last_time) = self._recent[0], self._recent[-1]
        return (last_time - began).total_seconds() / (last - first) * (self.num_steps - last)

    @property
    def tokens_per_s(self) -> float | None:
        """Median over the latest steps; None before the first."""
        return median(self._rates) if self._rates else None

    def layers(self) -> list[LayerLoad]:
        """Loads of every MoE layer, summed over the latest steps."""
        steps = [layers for layers in list(self._layers) if layers]
        if not steps:
            return []
        return [_sum_loads(per_step) for per_step in zip(*steps, strict=False)]


def preparation_of(event: Event) -> PreparationRecord | None:
    """Progress of data preparation in an event; None for other events."""
    preparing = event.data.get("preparing") if event.kind == "log" else None
    return PreparationRecord.read(preparing) if isinstance(preparing, dict) else None


def _sum_loads(per_step: Sequence[LayerRecord]) -> LayerLoad:
    loads = [layer.load for layer in per_step]
    return LayerLoad(
        layer=per_step[-1].layer,
        load=tuple(float(sum(column)) for column in zip(*loads, strict=True)),
        rejected=sum(layer.rejected or 0.0 for layer in per_step) / len(per_step),
        dropped=sum(layer.dropped or 0.0 for layer in per_step) / len(per_step),
    )


def _plan_in_words(data: dict[str, Any]) -> str:
    """`2 workers: expert 2, data 1; predicted 71.2 ms a step; before: 1 worker: ...`."""

    def plan_text(plan: dict[str, Any]) -> str:
        layout = ", ".join(f"{printable(str(name))} {printable(str(value))}" for name, value in plan["layout"].items())
        workers = int(plan["num_workers"])
        return f"{workers:,} worker{'' if workers == 1 else 's'}: {layout}"

    plan, before = data["plan"], data.get("before")
    prediction = f"predicted {1e3 * float(plan['predicted_step_s']):,.3g} ms per step"
    return f"{plan_text(plan)}; {prediction}" + (f"; before: {plan_text(before)}" if before else "")
