"""Causes of step-time differences between two plans, derived from their layouts."""

from typing import Any

from moe.plan.candidate import RECOMPUTES
from moe.plan.plan import Plan
from moe.plan.quantities import format_bytes, pluralize


class Causes:
    """Explains step-time differences by facts of the layouts that point the same way. Phrased about the first plan."""

    def __init__(self, first: Plan, second: Plan, ranks_per_node: int | None = None) -> None:
        self._first, self._second, self._node = first, second, ranks_per_node

    def cause(self, kind: str, is_more: bool) -> str:
        """Return why the first plan has more, or less, of a kind of time; empty if unexplained."""
        if self._first.module is not None or self._second.module is not None:
            return ""
        cause_of = {
            "products_s": self._recompute_cause, "attention_s": self._recompute_cause,
            "routing_s": self._recompute_cause, "elementwise_s": self._recompute_cause,
            "launches_s": self._launch_cause, "all_to_all_s": self._exchange_cause,
            "gather_s": self._gather_cause, "send_s": self._send_cause,
            "bubble_s": self._bubble_cause, "all_reduce_s": self._all_reduce_cause,
            "optimizer_s": self._optimizer_cause,
        }.get(kind)  # fmt: skip
        return "" if cause_of is None else cause_of(kind, is_more)

    def _degrees(self, axis: str) -> tuple[int, int]:
        return getattr(self._first.degrees, axis), getattr(self._second.degrees, axis)

    def _options(self, name: str) -> tuple[Any, Any]:
        return getattr(self._first.options, name), getattr(self._second.options, name)

    def _recompute_cause(self, kind: str, is_more: bool) -> str:
        # Recomputing hidden states costs matrix products and dispatch, and hardly anything else.
        subject = self._recomputed_part(is_more, costs_products=kind in ("products_s", "all_to_all_s"))
        if not subject:
            return ""
        if kind == "all_to_all_s":
            reason = "where {} are recomputed" if is_more else "since {} are not recomputed"
            return f"rows are {'' if is_more else 'not '}exchanged again {reason.format(subject)}"
        return f"{subject} are {'' if is_more else 'not '}recomputed in the backward pass"

    def _recomputed_part(self, is_more: bool, costs_products: bool) -> str:
        """Cause for activations that only one of the plans recomputes."""
        first, second = self._options("recompute")
        if not costs_products:
            first, second = ("none" if recompute == "selective" else recompute for recompute in (first, second))
        if not _is_consistent(RECOMPUTES.index(first), RECOMPUTES.index(second), is_more):
            return ""
        return "whole blocks" if "full" in (first, second) else "hidden states"

    def _launch_cause(self, kind: str, is_more: bool) -> str:
        first, second = self._options("num_micro_batches")
        if _is_consistent(first, second, is_more):
            return f"{pluralize(first, 'micro-batch', 'es')} per step rather than {second:,}"
        chunks, other = self._options("num_chunks")
        if first == second and _is_consistent(chunks, other, is_more):
            return f"rows are exchanged in {pluralize(chunks, 'chunk')} rather than {other:,}"
        return self._recompute_cause(kind, is_more)

    def _exchange_cause(self, kind: str, is_more: bool) -> str:
        first, second = (plan.degrees.expert * plan.degrees.expert_tensor for plan in (self._first, self._second))
        if _is_consistent(first, second, is_more):
            if first == 1:
                return "no row leaves its rank"
            if second == 1:
                return f"experts are spread over {first:,} ranks rather than whole on each"
            smaller, larger, node = min(first, second), max(first, second), self._node
            if node and smaller <= node < larger and node % smaller == 0:
                if is_more:
                    return f"expert groups of {first:,} span nodes of {node:,}, those of {second:,} stay within"
                return f"expert groups of {first:,} stay within nodes of {node:,}, those of {second:,} do not"
            return f"expert groups of {first:,} rather than {second:,}"
        if first != second:
            return ""
        nodes, other = self._options("ranks_per_node")
        if (nodes is None) != (other is None) and (nodes is None) == is_more:
            way = "to each of its experts" if is_more else "to each node once"
            return f"a token is sent {way}"
        (overlap, overlaps), (chunks, other_chunks) = self._options("overlap"), self._options("num_chunks")
        if overlap and not overlaps:
            return "" if is_more else "the exchange is hidden by another micro-batch's computation"
        if overlaps and not overlap:
            return "the exchange is not hidden by another micro-batch's computation" if is_more else ""
        if _is_consistent(other_chunks, chunks, is_more):
            behind = "" if is_more else ", hidden by computation"
            return f"rows are exchanged in {pluralize(chunks, 'chunk')} rather than {other_chunks:,}{behind}"
        return self._recompute_cause(kind, is_more)

    def _gather_cause(self, kind: str, is_more: bool) -> str:
        causes = []
        for axis in ("tensor", "context"):
            first, second = self._degrees(axis)
            if _is_consistent(first, second, is_more):
                causes.append(f"{axis} degree {first:,} rather than {second:,}")
        gathers, other = self._first.candidate.gathers, self._second.candidate.gathers
        times = self._options("num_micro_batches")
        if gathers != other:
            if gathers == is_more:
                causes.append("parameters are gathered where used" if gathers else "no parameters are gathered")
        elif gathers and _is_consistent(*times, is_more):
            causes.append(f"parameters are gathered for {times[0]:,} micro-batches per step rather than {times[1]:,}")
        return ", and ".join(causes)

    def _send_cause(self, kind: str, is_more: bool) -> str:
        first, second = self._degrees("pipeline")
        if _is_consistent(first, second, is_more):
            return _describe_stages(first, second)
        runs, other = self._options("virtual_stages")
        if first == second and _is_consistent(runs, other, is_more):
            return f"each stage sends {runs:,} times per micro-batch rather than {other:,}"
        return ""

    def _bubble_cause(self, kind: str, is_more: bool) -> str:
        """Factors of the bubble that differ: (p - 1) / (v m), of stages, virtual stages and micro-batches."""
        (stages, other_stages), (runs, other_runs) = self._degrees("pipeline"), self._options("virtual_stages")
        times, other_times = self._options("num_micro_batches")
        if not _is_consistent((stages - 1) * other_runs * other_times, (other_stages - 1) * runs * times, is_more):
            return ""
        if 1 in (stages, other_stages):
            return _describe_stages(stages, other_stages)
        causes = []
        if (stages, runs) != (other_stages, other_runs):
            causes.append(
                f"{stages:,} stages of {pluralize(runs, 'virtual stage')} rather than "
                f"{other_stages:,} of {other_runs:,}"
            )
        if times != other_times:
            causes.append(f"{pluralize(times, 'micro-batch', 'es')} per step rather than {other_times:,}")
        return ", ".join(causes)

    def _all_reduce_cause(self, kind: str, is_more: bool) -> str:
        first, second = self._first.candidate.gathers, self._second.candidate.gathers
        if first and not second and not is_more:
            return "gradients of sharded parameters are scattered instead"
        if second and not first and is_more:
            return "gradients are all-reduced, not scattered"
        if first != second:
            return ""
        ranks, other = (plan.degrees.stage_workers // plan.degrees.tensor for plan in (self._first, self._second))
        if cause := self._state_cause("gradients", is_more):
            return cause
        return f"summed over {ranks:,} ranks rather than {other:,}" if _is_consistent(ranks, other, is_more) else ""

    def _optimizer_cause(self, kind: str, is_more: bool) -> str:
        return self._state_cause("optimizer", is_more)

    def _state_cause(self, kind: str, is_more: bool) -> str:
        first, second = (plan.memory.by_kind()[kind] for plan in (self._first, self._second))
        subject = {"gradients": "gradients", "optimizer": "optimizer state"}[kind]
        if not _is_consistent(first, second, is_more) or format_bytes(first) == format_bytes(second):
            return ""
        return f"{format_bytes(first)} of {subject} per device rather than {format_bytes(second)}"


def _is_consistent(first: float, second: float, is_more: bool) -> bool:
    """Whether a quantity that increases the time differs in the same direction as the time."""
    return first > second if is_more else first < second


def _describe_stages(first: int, second: int) -> str:
    if first == 1:
        return f"one stage rather than {second:,}"
    return f"{first:,} stages rather than {second if second > 1 else 'one'}"
