"""Every router in which tokens choose, and expert choice, one token at a time: slow and obvious.

Written from the papers that `MoESpec.router` names, with Python floats. GShard's gating is in reference_gating.py.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

from moe.spec import MoESpec


@dataclass
class KeptChoices:
    """Accepted choices of one group: (token, expert, place in the expert's buffer) -> weight, unordered."""

    weights: dict[tuple[int, int, int], float] = field(default_factory=dict)
    num_dropped: int = 0


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(x - max(row)) for x in row]
    return [x / sum(powers) for x in powers]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def best(row: list[float], k: int) -> list[int]:
    """Indices of the k highest values, best first; ties go to the lower index."""
    return sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]


def choices_of(spec: MoESpec, row: list[float], bias: list[float] | None) -> tuple[list[int], list[float]]:
    """(experts by preference, weights) of a token with these logits."""
    probs = softmax(row)
    if spec.routing.router == "switch_top1":
        (expert,) = best(probs, 1)
        return [expert], [probs[expert]]
    scores = probs if spec.routing.router == "softmax_topk" else [sigmoid(x) for x in row]
    selection_scores = [s + b for s, b in zip(scores, bias, strict=True)] if bias else row
    if spec.routing.router == "sigmoid_topk" and not bias:
        selection_scores = scores
    experts = best(in_best_groups(spec, selection_scores), spec.routing.top_k)
    weights = [scores[e] for e in experts]
    if spec.routing.router == "softmax_topk" and spec.routing.softmax == "after_topk":
        weights = softmax([row[e] for e in experts])
    elif spec.routing.renormalizes:
        # DeepSeek's released code adds this, so that no sum of sigmoids is 0.
        above_zero = 1e-20 if spec.routing.router == "sigmoid_topk" else 0.0
        weights = [w / (sum(weights) + above_zero) for w in weights]
    return experts, [w * spec.routing.routed_scaling_factor for w in weights]


def in_best_groups(spec: MoESpec, scores: list[float]) -> list[float]:
    """Scores of the groups with the best expert (under sigmoid: the best two experts); -inf in other groups."""
    group_size = spec.num_experts // spec.routing.num_expert_groups
    groups = [scores[first : first + group_size] for first in range(0, spec.num_experts, group_size)]
    num_best = {"softmax_topk": 1, "sigmoid_topk": 2}[spec.routing.router]
    strength = [sum(sorted(group, reverse=True)[:num_best]) for group in groups]
    standing = best(strength, spec.routing.expert_groups_per_token)
    return [value if e // group_size in standing else -math.inf for e, value in enumerate(scores)]


def capacity_of(spec: MoESpec, group_tokens: int) -> int | None:
    if spec.routing.capacity_factor is None:
        return None
    k = 1 if spec.routing.router == "switch_top1" else spec.routing.top_k
    factor = Fraction(str(spec.routing.capacity_factor))  # as it is written, 1.1 for one
    return max(1, spec.routing.min_capacity, math.ceil(k * group_tokens * factor / spec.num_experts))


def rounding(rows: list[list[float]], padding: list[bool]) -> float:
    """Largest difference that rounding causes between log probabilities of equal logits in float64."""
    largest = max((abs(x) for row, pad in zip(rows, padding, strict=True) if not pad for x in row), default=0.0)
    return 64 * 2.0**-52 * (1 + largest)


def likeliest_first(values: list[float], tolerance: float) -> list[int]:
    """Indices by value, largest first; a run of neighbours within the tolerance counts as equal and keeps its index
    order."""
    runs: list[list[int]] = []
    for index in sorted(range(len(values)), key=lambda index: -values[index]):
        last = values[index] if not runs else values[runs[-1][-1]]
        if runs and (
            last == values[index] or (values[index] > 0 and math.log(last) - math.log(values[index]) <= tolerance)
        ):
            runs[-1].append(index)
        else:
            runs.append([index])
    return [index for run in runs for index in sorted(run)]


def admit(
    spec: MoESpec, choices: list[tuple[list[int], list[float]] | None], capacity: int | None, tolerance: float = 0.0
) -> KeptChoices:
    """Accepted choices; `choices` has None for padding. Log weights within `tolerance` count as equal."""
    result = KeptChoices()
    for expert in range(spec.num_experts):
        queue = [
            (preference, token, choice[1][preference])
            for token, choice in enumerate(choices)
            if choice is not None
            for preference, e in enumerate(choice[0])
            if e == expert
        ]
        queue.sort()
        if spec.routing.drop_by == "probability" and capacity is not None:
            queue = [queue[index] for index in likeliest_first([weight for *_, weight in queue], tolerance)]
        for place, (_, token, weight) in enumerate(queue):
            if capacity is None or place < capacity:
                result.weights[token, expert, place] = weight
            else:
                result.num_dropped += 1
    return result


def expert_choice(spec: MoESpec, rows: list[list[float]], padding: list[bool]) -> KeptChoices:
    result, probs = KeptChoices(), [softmax(row) for row in rows]
    real = [token for token in range(len(rows)) if not padding[token]]
    takes = math.ceil(len(real) * Fraction(str(spec.routing.capacity_factor)) / spec.num_experts)
    for expert in range(spec.num_experts):
        order = likeliest_first([probs[token][expert] for token in real], rounding(rows, padding))
        for place, token in enumerate([real[index] for index in order][:takes]):
            result.weights[token, expert, place] = probs[token][expert]
    return result


def sinkhorn(rows: list[list[float]], padding: list[bool], iterations: int) -> list[list[float] | None]:
    """Transport plan of a group, in Python floats; None for padding."""
    plan = [None if pad else [math.exp(x) for x in row] for row, pad in zip(rows, padding, strict=True)]
    real = [row for row in plan if row is not None]
    for _ in range(iterations):
        for row in real:
            row[:] = [x / sum(row) for x in row]
        for e in range(len(rows[0])):
            column = sum(row[e] for row in real)
            for row in real:
                row[e] *= len(real) / len(row) / column
    return plan


def best_of_close(mass: list[float], logits: list[float], k: int) -> list[int]:
    """The k experts with the most mass, best first; ties, also by rounding alone, go to the higher logit, then to the
    lower index."""
    left, experts = list(range(len(mass))), []
    for _ in range(k):
        largest = max(mass[e] for e in left)
        close = [e for e in left if mass[e] > largest * (1 - 1e-12)]
        highest = max(logits[e] for e in close)
        experts.append(next(e for e in close if logits[e] > highest - 1e-12))
        left.remove(experts[-1])
    return experts


def balancing_loss(
    num_experts: int, scopes: list[list[tuple[list[float], list[int]] | None]], last: list[int] | None = None
) -> float:
    """Mean over scopes of E · sum f · P; a scope has (probabilities, chosen experts) of each token, None for padding.

    With the loads of the last step, the batch is one scope.
    """
    losses = []
    if last is not None:
        scopes = [[token for scope in scopes for token in scope]]
    for scope in scopes:
        tokens = [token for token in scope if token is not None]
        if not tokens:
            continue
        choices = [e for _, experts in tokens for e in experts]
        shares = [choices.count(e) / len(choices) for e in range(num_experts)]
        if last is not None:
            shares = [load / sum(last) if sum(last) else 1 / num_experts for load in last]
        means = [sum(probs[e] for probs, _ in tokens) / len(tokens) for e in range(num_experts)]
        losses.append(num_experts * sum(f * p for f, p in zip(shares, means, strict=True)))
    return sum(losses) / len(losses) if losses else 0.0
