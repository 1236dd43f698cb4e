"""GShard's gating one token at a time, written from the paper's Algorithm 1: slow and obvious.

Where the released code differs, the same switch of `MoESpec` selects its rule. The softmax and the random draws are
arguments, so every decision that follows from them is compared.
"""

from dataclasses import dataclass, field

from moe.spec import MoESpec


@dataclass
class GroupResult:
    """Gating of the tokens of one group."""

    experts: list[list[int]] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)
    is_kept: list[list[bool]] = field(default_factory=list)
    positions: list[list[int]] = field(default_factory=list)
    num_rejected: int = 0
    num_dropped: int = 0
    real: int = 0
    aux_loss: float = 0.0


def capacity_of(spec: MoESpec, group_tokens: int) -> int:
    if spec.routing.capacity_rule == "paper":
        capacity = 0
        while capacity * spec.num_experts < 2 * group_tokens:
            capacity += 1
        return max(1, capacity)
    automatic = int(group_tokens * spec.routing.capacity_factor / spec.num_experts)
    if automatic == 0:
        automatic = 4
    if spec.routing.min_capacity >= automatic:
        return spec.routing.min_capacity
    while automatic % 4:
        automatic += 1
    return automatic


def gate_group(
    probs: list[list[float]], padding: list[bool], draws: list[float], second: list[int], spec: MoESpec, capacity: int
) -> GroupResult:
    """Algorithm 1 on one group: `probs` [S][E], uniform `draws` [S], and each token's second expert, `second` [S]."""
    group_tokens, num_experts = len(probs), spec.num_experts
    result = GroupResult()
    counter = [0] * num_experts
    chosen_first = [0] * num_experts
    sum_probs = [0.0] * num_experts
    choices: list[tuple[int, float, float]] = []

    for s in range(group_tokens):  # first choices, in token order
        first = max(range(num_experts), key=lambda e: (probs[s][e], -e))
        g1 = probs[s][first]
        g2 = probs[s][second[s]] if num_experts > 1 else 0.0
        if num_experts == 1:
            g1 = 1.0
        elif spec.routing.normalize_gates == "before_drop":
            total = g1 + g2 + 1e-9
            g1, g2 = g1 / total, g2 / total
        choices.append((first, g1, g2))
        result.experts.append([first])
        if padding[s]:
            result.is_kept.append([False])
            result.positions.append([-1])
            continue
        result.real += 1
        chosen_first[first] += 1
        for e in range(num_experts):
            sum_probs[e] += probs[s][e]
        position = counter[first]
        counter[first] += 1
        is_kept = position < capacity
        result.num_dropped += not is_kept
        result.is_kept.append([is_kept])
        result.positions.append([position])

    means = [total / group_tokens for total in sum_probs]
    shares = [count / group_tokens for count in chosen_first]
    if spec.routing.normalize_gates == "after_drop":
        real_share = result.real / group_tokens + 1e-6
        means = [mean / real_share for mean in means]
        shares = [share / real_share for share in shares]
    result.aux_loss = sum(c * m for c, m in zip(shares, means, strict=True)) / num_experts
    if spec.routing.aux_form == "e_squared":
        result.aux_loss *= num_experts**2

    if num_experts > 1:  # second choices come after every first one
        counter = [min(count, capacity) for count in counter]
        for s in range(group_tokens):
            e2, g2 = second[s], choices[s][2]
            result.experts[s].append(e2)
            if padding[s]:
                result.is_kept[s].append(False)
                result.positions[s].append(-1)
                continue
            is_accepted = spec.routing.second_expert != "random" or draws[s] < g2 / max(
                spec.routing.second_expert_threshold, 1e-9
            )
            position = counter[e2]
            if is_accepted or spec.routing.rejected_second_takes_slot:
                counter[e2] += 1
            is_kept = is_accepted and position < capacity
            result.num_rejected += not is_accepted
            result.num_dropped += is_accepted and not is_kept
            result.is_kept[s].append(is_kept)
            result.positions[s].append(position if is_accepted else -1)

    for s in range(group_tokens):
        gates = [choices[s][1], choices[s][2]][: len(result.is_kept[s])]
        weights = [gate if is_kept else 0.0 for gate, is_kept in zip(gates, result.is_kept[s], strict=True)]
        if spec.routing.normalize_gates == "after_drop" and num_experts > 1:
            total = sum(weights)
            weights = [weight / total if total > 0 else 0.0 for weight in weights]
        result.weights.append(weights)
    return result
