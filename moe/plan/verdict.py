"""Verdict on a plan: whether it fits and can be run, its speed, and what would be faster."""

from collections.abc import Iterator

from moe.plan.cluster.devices import DEVICES
from moe.plan.plan import Plan
from moe.plan.quantities import format_bytes, format_seconds, pluralize
from moe.plan.speed import describe_speed

_GOAL_MARKS = (", for goal ", ", as goal ")
"""Phrases in the reason for a number of workers chosen by goal, in current plans and those of earlier releases."""


def verdict(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) pairs, the most important first."""
    yield "fits", _fits(plan)
    yield "can be run", _can_be_run(plan)
    if plan.missing:
        yield "missing", "; ".join(plan.missing)
    yield "speed", _speed(plan)
    if by_goal := next((reason for reason in plan.reasons if any(mark in reason for mark in _GOAL_MARKS)), None):
        yield "workers", by_goal
    for place, value in plan.defaults.items():
        yield "by default", _by_default(plan, place, value)
    if faster := _faster(plan):
        yield "faster", faster


def _fits(plan: Plan) -> str:
    memory = plan.memory
    word = "yes" if memory.margin >= memory.allowance else "no"
    usage = f"{format_bytes(memory.job_bytes)} of a device's {format_bytes(memory.limit)}"
    return f"{word}: {usage}; {format_bytes(max(0, memory.margin))} free for the framework and its allocator"


def _can_be_run(plan: Plan) -> str:
    if not plan.not_yet:
        answer = "yes"
        if (fewest := plan.fewest) is not None and fewest.in_any_layout != fewest.to_run:
            workers = pluralize(fewest.in_any_layout or 0, "worker")
            answer += f"; {workers} would hold it only in a layout that cannot be run yet"
        return answer
    answer = f"not yet: {', '.join(plan.not_yet)}"
    if plan.fewest is None:
        return answer
    if (to_run := plan.fewest.to_run) is None:
        return f"{answer}; no number of workers of this kind has a layout that can be run"
    return f"{answer}; a layout that can be run takes {pluralize(to_run, 'worker')} of this kind"


def _speed(plan: Plan) -> str:
    step = f"{format_seconds(plan.predicted.step_s)} per step"
    if plan.ends_s is not None:
        step += f" ({format_seconds(plan.ends_s[0])} to {format_seconds(plan.ends_s[1])})"
    speed = f"{step}, {plan.tokens_per_s:,.0f} tokens/s"
    if (utilization := plan.utilization) is not None:
        speed += f", MFU {utilization:.0%} ({plan.flops_per_s_per_device / 1e12:,.0f} TFLOP/s per device)"
    return speed


def _by_default(plan: Plan, place: str, value: str) -> str:
    answer = f"{value}: {place} is not set"
    peaks = DEVICES[plan.device_type].peak_flops_per_s if plan.device_type in DEVICES else {}
    if place == "train.dtype" and plan.device != "cpu" and "bfloat16" in peaks and value in peaks:
        times = peaks["bfloat16"] / peaks[value]
        if times > 1:
            answer += f"; peak bfloat16 throughput is {times:.3g} times as high on {plan.device_type}"
    if place == "adapter.base":
        answer += "; in bfloat16 the base weights take half the memory"
    return answer


def _faster(plan: Plan) -> str:
    """The fastest runner-up that cannot be run yet, if faster than a plan that can; else empty."""
    candidates = [runner_up for runner_up in plan.runners_up if runner_up.not_yet and runner_up.step_s is not None]
    if plan.not_yet or not candidates:
        return ""
    best = min(candidates, key=lambda runner_up: runner_up.step_s or 0.0)
    assert best.step_s is not None
    if best.step_s >= plan.predicted.step_s:
        return ""
    speed, place = describe_speed(best.step_s, plan.predicted.step_s), plan.runners_up.index(best) + 2
    return f"layout {place} below is {speed}, but cannot be run yet"
