"""Programs of `moe.kernels.routing` in Triton: scores and choices of a block of tokens, their balance, sums over blocks
and scopes, and gradients of logits."""

import triton
import triton.language as tl

_Z, _ENTROPY, _REAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Columns of a block's sums over its real tokens: squared logsumexp, entropy, and 1."""
SUMS = tl.constexpr(4)
"""Columns of those sums in memory."""


@triton.jit(do_not_specialize=["scope_tokens"])
def route(
    logits_ptr, padding_ptr, bias_ptr, expert_ptr, weight_ptr, kept_ptr, count_ptr, probability_ptr, sums_ptr,
    scope_tokens, scaling_factor, TOP_K: tl.constexpr, SCORES: tl.constexpr, RENORMALIZES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PER_TOKEN: tl.constexpr,
    NUM_BEST: tl.constexpr,
):  # fmt: skip
    """Experts and weights of a block of tokens, and its sums: choices and probabilities by expert, and scalars. Moves
    the logits once."""
    block, scope, num_blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    experts, choices = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    logits, token, is_token = _logits_of(logits_ptr, scope, block, scope_tokens, NUM_EXPERTS, EXPERTS, BLOCK)
    is_real = is_token
    if HAS_PADDING:
        is_real = is_token & (tl.load(padding_ptr + token, mask=is_token, other=1) == 0)
    probabilities, scores, log_sum = _scores_of(logits, experts, SCORES, NUM_EXPERTS)

    wanted = scores
    if SCORES == "softmax":
        wanted = logits
    if HAS_BIAS:
        bias = tl.load(bias_ptr + experts, mask=experts < NUM_EXPERTS, other=0.0).to(tl.float32)
        wanted = scores + bias[None, :]
    wanted = tl.where(wanted == wanted, wanted, float("inf"))  # NaN is chosen first, as by torch
    wanted = tl.where((experts < NUM_EXPERTS)[None, :], wanted, float("-inf"))
    if GROUPS_PER_TOKEN < GROUPS:
        wanted = _in_best_groups(wanted, BLOCK, GROUPS, EXPERTS // GROUPS, GROUPS_PER_TOKEN, NUM_BEST)

    chosen_expert = tl.zeros((BLOCK, CHOICES), tl.int32)
    chosen_value = tl.full((BLOCK, CHOICES), float("-inf"), tl.float32)
    times_chosen = tl.zeros((BLOCK, EXPERTS), tl.int32)
    for choice in tl.static_range(TOP_K):
        best = _first_of_highest(wanted, times_chosen, experts, NUM_EXPERTS)
        is_best = experts[None, :] == best[:, None]
        value = scores
        if SCORES == "softmax":
            value = logits
        value = tl.sum(tl.where(is_best, value, 0.0), axis=1)
        is_choice = choices[None, :] == choice
        chosen_expert = tl.where(is_choice, best[:, None], chosen_expert)
        chosen_value = tl.where(is_choice, value[:, None], chosen_value)
        times_chosen += is_best.to(tl.int32)
        wanted = tl.where(is_best, float("-inf"), wanted)

    weight = _weights_of(chosen_value, choices, log_sum, SCORES, RENORMALIZES, TOP_K) * scaling_factor
    weight = tl.where(is_real[:, None], weight, 0.0)
    offsets = token[:, None] * TOP_K + choices[None, :]
    mask = is_token[:, None] & (choices < TOP_K)[None, :]
    tl.store(expert_ptr + offsets, chosen_expert.to(tl.int64), mask=mask)
    tl.store(weight_ptr + offsets, weight, mask=mask)
    tl.store(kept_ptr + offsets, is_real[:, None] & (choices < TOP_K)[None, :], mask=mask)

    part = scope * num_blocks + block
    by_expert = part * NUM_EXPERTS + experts
    count = tl.sum(tl.where(is_real[:, None], times_chosen, 0), axis=0)
    tl.store(count_ptr + by_expert, count, mask=experts < NUM_EXPERTS)
    real_probabilities = tl.where(is_real[:, None], probabilities, 0.0)
    tl.store(probability_ptr + by_expert, tl.sum(real_probabilities, axis=0), mask=experts < NUM_EXPERTS)
    logarithms = tl.log(tl.where(real_probabilities > 0, real_probabilities, 1.0))
    entropy = -tl.sum(tl.sum(real_probabilities * logarithms, axis=1), axis=0)
    squares = tl.sum(tl.where(is_real, log_sum * log_sum, 0.0), axis=0)
    column = tl.arange(0, SUMS)
    values = tl.where(column == _Z, squares, tl.where(column == _ENTROPY, entropy, 0.0))
    values = tl.where(column == _REAL, tl.sum(is_real.to(tl.float32), axis=0), values)
    tl.store(sums_ptr + part * SUMS + column, values)


@triton.jit(do_not_specialize=["num_scopes", "num_blocks"])
def balance(
    count_ptr, probability_ptr, sums_ptr, last_load_ptr, chosen_ptr, slope_ptr, part_ptr, num_scopes, num_blocks,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, ALL_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr, BY_LAST_LOAD: tl.constexpr, HAS_LAST_LOAD: tl.constexpr,
):  # fmt: skip
    """Writes `chosen` `[E]`; `slope` `[U, E]`, by scope the gradient of the summed losses with respect to each token's
    probabilities; and `part`, the sum of these experts' excess loads times their mean probabilities. Moves the blocks'
    counts and sums once."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    is_expert = expert < NUM_EXPERTS
    chosen = tl.zeros((EXPERTS,), tl.int64)
    total = tl.zeros((EXPERTS,), tl.float32)
    for scope in range(num_scopes):
        count = tl.zeros((EXPERTS,), tl.int32)
        probability = tl.zeros((EXPERTS,), tl.float32)
        num_tokens = tl.zeros((), tl.float32)
        for first in range(0, num_blocks, BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            is_block = block < num_blocks
            row = scope * num_blocks + block
            offsets, mask = row[:, None] * NUM_EXPERTS + expert[None, :], is_block[:, None] & is_expert[None, :]
            count += tl.sum(tl.load(count_ptr + offsets, mask=mask, other=0), axis=0)
            probability += tl.sum(tl.load(probability_ptr + offsets, mask=mask, other=0.0), axis=0)
            num_tokens += tl.sum(tl.load(sums_ptr + row * SUMS + _REAL, mask=is_block, other=0.0), axis=0)
        chosen += count.to(tl.int64)
        at_least_one = tl.maximum(num_tokens, 1.0)
        excess = tl.zeros((EXPERTS,), tl.float32)
        if BY_LAST_LOAD:
            if HAS_LAST_LOAD:
                experts = tl.arange(0, ALL_EXPERTS)
                load = tl.load(last_load_ptr + experts, mask=experts < NUM_EXPERTS, other=0).to(tl.float32)
                all_load = tl.sum(load, axis=0)
                load = tl.load(last_load_ptr + expert, mask=is_expert, other=0).to(tl.float32)
                excess = tl.where(all_load > 0, load / tl.maximum(all_load, 1.0) - 1.0 / NUM_EXPERTS, 0.0)
        else:
            excess = tl.where(num_tokens > 0, count / (at_least_one * TOP_K) - 1.0 / NUM_EXPERTS, 0.0)
        excess = tl.where(is_expert, excess, 0.0)
        tl.store(slope_ptr + scope * NUM_EXPERTS + expert, excess / at_least_one, mask=is_expert)
        total += excess * probability / at_least_one
    tl.store(chosen_ptr + expert, chosen, mask=is_expert)
    tl.store(part_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["num_scopes", "num_blocks"])
def summarize(
    sums_ptr, part_ptr, load_ptr, aux_loss_ptr, z_loss_ptr, weighted_loss_ptr, entropy_ptr, scalars_ptr,
    unit_counts_ptr, num_scopes, num_blocks, aux_scale, z_scale, batch_units, batch_tokens,
    NUM_EXPERTS: tl.constexpr, ALL_EXPERTS: tl.constexpr, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr,
    BLOCKS: tl.constexpr, TOP_K: tl.constexpr, BY_LAST_LOAD: tl.constexpr,
):  # fmt: skip
    """The scalars of all tokens. Moves the blocks' sums once."""
    zero = tl.zeros((), tl.float32)
    squares, entropy, num_tokens, used_scopes = zero, zero, zero, zero
    for scope in range(num_scopes):
        tokens_of_scope = zero
        for first in range(0, num_blocks, BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            row_ptr = sums_ptr + (scope * num_blocks + block) * SUMS
            squares += tl.sum(tl.load(row_ptr + _Z, mask=block < num_blocks, other=0.0), axis=0)
            entropy += tl.sum(tl.load(row_ptr + _ENTROPY, mask=block < num_blocks, other=0.0), axis=0)
            tokens_of_scope += tl.sum(tl.load(row_ptr + _REAL, mask=block < num_blocks, other=0.0), axis=0)
        num_tokens += tokens_of_scope
        used_scopes += tl.where(tokens_of_scope > 0, 1.0, 0.0)
    part = tl.arange(0, PARTS)
    excess = tl.sum(tl.load(part_ptr + part, mask=part < NUM_PARTS, other=0.0), axis=0)
    at_least_one = tl.maximum(num_tokens, 1.0)
    aux_loss = tl.minimum(used_scopes, 1.0) + NUM_EXPERTS * excess / tl.maximum(used_scopes, 1.0)
    z_loss = squares / at_least_one
    units = used_scopes
    if BY_LAST_LOAD:
        units = num_tokens
    weighted_loss = aux_loss * aux_scale * _share(units, batch_units)
    weighted_loss += z_loss * z_scale * _share(num_tokens, batch_tokens)
    tl.store(aux_loss_ptr, aux_loss)
    tl.store(z_loss_ptr, z_loss)
    tl.store(weighted_loss_ptr, weighted_loss)
    tl.store(entropy_ptr, entropy / at_least_one)
    tl.store(unit_counts_ptr, used_scopes.to(tl.int64))
    tl.store(unit_counts_ptr + 1, num_tokens.to(tl.int64))
    tl.store(unit_counts_ptr + 2, num_tokens.to(tl.int64) * TOP_K)
    experts = tl.arange(0, ALL_EXPERTS)
    load = tl.sum(tl.load(load_ptr + experts, mask=experts < NUM_EXPERTS, other=0), axis=0)
    num_choices = num_tokens.to(tl.int64) * TOP_K
    tl.store(scalars_ptr, 0.0)
    tl.store(scalars_ptr + 1, (num_choices - load).to(tl.float32) / tl.maximum(num_choices, 1).to(tl.float32))
    tl.store(scalars_ptr + 2, 1.0)


@triton.jit(do_not_specialize=["scope_tokens"])
def route_backward(
    logits_ptr, padding_ptr, kept_ptr, expert_ptr, slope_ptr, unit_counts_ptr, d_weight_ptr, d_aux_ptr, d_z_ptr,
    d_weighted_ptr, d_logits_ptr, scope_tokens, scaling_factor, aux_scale, z_scale, batch_units, batch_tokens,
    TOP_K: tl.constexpr, SCORES: tl.constexpr, RENORMALIZES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_CAPACITY: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_AUX: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_WEIGHTED: tl.constexpr, BY_LAST_LOAD: tl.constexpr,
):  # fmt: skip
    """Gradient of the logits of a block of tokens. Moves the logits twice."""
    block, scope = tl.program_id(0), tl.program_id(1)
    experts, choices = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    is_expert = experts < NUM_EXPERTS
    logits, token, is_token = _logits_of(logits_ptr, scope, block, scope_tokens, NUM_EXPERTS, EXPERTS, BLOCK)
    is_real = is_token
    if HAS_PADDING:
        is_real = is_token & (tl.load(padding_ptr + token, mask=is_token, other=1) == 0)
    probabilities, scores, log_sum = _scores_of(logits, experts, SCORES, NUM_EXPERTS)
    used_scopes = tl.load(unit_counts_ptr).to(tl.float32)
    num_tokens = tl.load(unit_counts_ptr + 1).to(tl.float32)
    d_aux, d_z = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    if HAS_AUX:
        d_aux += tl.load(d_aux_ptr)
    if HAS_Z:
        d_z += tl.load(d_z_ptr)
    if HAS_WEIGHTED:
        units = used_scopes
        if BY_LAST_LOAD:
            units = num_tokens
        d_weighted = tl.load(d_weighted_ptr)
        d_aux += d_weighted * aux_scale * _share(units, batch_units)
        d_z += d_weighted * z_scale * _share(num_tokens, batch_tokens)

    d_logits = tl.zeros((BLOCK, EXPERTS), tl.float32)
    d_scores = tl.zeros((BLOCK, EXPERTS), tl.float32)
    if HAS_WEIGHT:
        offsets = token[:, None] * TOP_K + choices[None, :]
        mask = is_token[:, None] & (choices < TOP_K)[None, :]
        expert = tl.load(expert_ptr + offsets, mask=mask, other=-1).to(tl.int32)
        is_kept = mask & is_real[:, None]
        if HAS_CAPACITY:
            is_kept = mask & (tl.load(kept_ptr + offsets, mask=mask, other=0) != 0)
        d_weight = tl.load(d_weight_ptr + offsets, mask=is_kept, other=0.0) * scaling_factor
        d_logits, d_scores = _choice_gradients(
            expert, d_weight, logits, scores, log_sum, experts, choices, SCORES, RENORMALIZES, TOP_K
        )
    d_probabilities = tl.zeros((BLOCK, EXPERTS), tl.float32)
    if HAS_AUX or HAS_WEIGHTED:
        slope = tl.load(slope_ptr + scope * NUM_EXPERTS + experts, mask=is_expert, other=0.0)
        d_excess = d_aux * NUM_EXPERTS / tl.maximum(used_scopes, 1.0)
        d_probabilities = tl.where(is_real[:, None], d_excess * slope[None, :], 0.0)
    if SCORES == "softmax":
        d_probabilities += d_scores
        mean = tl.sum(d_probabilities * probabilities, axis=1)[:, None]
        d_logits += probabilities * (d_probabilities - mean)
    else:
        mean = tl.sum(d_probabilities * probabilities, axis=1)[:, None]
        d_scores += (d_probabilities - mean) / (tl.sum(scores, axis=1) + 1e-20)[:, None]
        d_logits += d_scores * scores * (1 - scores)
    if HAS_Z or HAS_WEIGHTED:
        d_log_sum = d_z * 2 * log_sum / tl.maximum(num_tokens, 1.0)
        softmax = tl.where(is_expert[None, :], tl.exp(logits - log_sum[:, None]), 0.0)
        d_logits += tl.where(is_real, d_log_sum, 0.0)[:, None] * softmax
    offsets = token[:, None] * NUM_EXPERTS + experts[None, :]
    tl.store(d_logits_ptr + offsets, d_logits, mask=is_token[:, None] & is_expert[None, :])


@triton.jit
def _choice_gradients(
    expert, d_weight, logits, scores, log_sum, experts, choices, SCORES: tl.constexpr, RENORMALIZES: tl.constexpr,
    TOP_K: tl.constexpr,
):  # fmt: skip
    """(gradient of the logits, gradient of the scores), each `[BLOCK, EXPERTS]`, through the weights of the choices
    `expert` `[BLOCK, CHOICES]`, whose gradient before scaling is `d_weight`."""
    d_logits, d_scores = tl.zeros_like(logits), tl.zeros_like(logits)
    value = tl.full(d_weight.shape, float("-inf"), tl.float32)
    for choice in tl.static_range(TOP_K):
        own = tl.sum(tl.where(choices[None, :] == choice, expert, 0), axis=1)
        is_own = experts[None, :] == own[:, None]
        own_value = scores
        if SCORES == "softmax":
            own_value = logits
        own_value = tl.sum(tl.where(is_own, own_value, 0.0), axis=1)
        value = tl.where(choices[None, :] == choice, own_value[:, None], value)
    weight = _weights_of(value, choices, log_sum, SCORES, RENORMALIZES, TOP_K)
    d_value = d_weight
    if RENORMALIZES:
        mean = tl.sum(d_weight * weight, axis=1)[:, None]
        if SCORES == "softmax":
            d_value = weight * (d_weight - mean)
        else:
            sum_of_scores = tl.sum(tl.where((choices < TOP_K)[None, :], value, 0.0), axis=1) + 1e-20
            d_value = (d_weight - mean) / sum_of_scores[:, None]
    for choice in tl.static_range(TOP_K):
        is_choice = choices[None, :] == choice
        own = tl.sum(tl.where(is_choice, expert, 0), axis=1)
        own_gradient = tl.sum(tl.where(is_choice, d_value, 0.0), axis=1)
        added = tl.where(experts[None, :] == own[:, None], own_gradient[:, None], 0.0)
        if RENORMALIZES and SCORES == "softmax":
            d_logits += added
        else:
            d_scores += added
    return d_logits, d_scores


@triton.jit
def _share(number, batch_number):
    """Share of this call's units in those of the batch; 1 if they are all, and 0 without any."""
    return number / tl.where(batch_number > 0, batch_number, tl.maximum(number, 1.0))


@triton.jit
def _logits_of(
    logits_ptr, scope, block, scope_tokens, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """(logits `[BLOCK, EXPERTS]`, index of each token, whether it exists)."""
    position = block * BLOCK + tl.arange(0, BLOCK)
    is_token = position < scope_tokens
    token = scope.to(tl.int64) * scope_tokens + position
    experts = tl.arange(0, EXPERTS)
    mask = is_token[:, None] & (experts < NUM_EXPERTS)[None, :]
    return tl.load(logits_ptr + token[:, None] * NUM_EXPERTS + experts[None, :], mask=mask, other=0.0), token, is_token


@triton.jit
def _scores_of(logits, experts, SCORES: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """(probabilities, scores, logsumexp of the logits) of each token; under softmax, scores are probabilities."""
    is_expert = (experts < NUM_EXPERTS)[None, :]
    highest = tl.max(tl.where(is_expert, logits, float("-inf")), axis=1)
    powers = tl.where(is_expert, tl.exp(logits - highest[:, None]), 0.0)
    total = tl.sum(powers, axis=1)
    log_sum = highest + tl.log(total)
    if SCORES == "softmax":
        probabilities = powers / total[:, None]
        scores = probabilities
    else:
        scores = tl.where(is_expert, 1 / (1 + tl.exp(-logits)), 0.0)
        probabilities = scores / (tl.sum(scores, axis=1) + 1e-20)[:, None]
    return probabilities, scores, log_sum


@triton.jit
def _weights_of(value, choices, log_sum, SCORES: tl.constexpr, RENORMALIZES: tl.constexpr, TOP_K: tl.constexpr):
    """Weights of the choices from their logits (softmax) or scores (sigmoid), before scaling."""
    is_choice = (choices < TOP_K)[None, :]
    if SCORES == "softmax":
        if RENORMALIZES:
            powers = tl.exp(value - tl.max(value, axis=1)[:, None])
            weight = powers / tl.sum(tl.where(is_choice, powers, 0.0), axis=1)[:, None]
        else:
            weight = tl.exp(value - log_sum[:, None])
    elif RENORMALIZES:
        weight = value / (tl.sum(tl.where(is_choice, value, 0.0), axis=1) + 1e-20)[:, None]
    else:
        weight = value
    return tl.where(is_choice, weight, 0.0)


@triton.jit
def _first_of_highest(values, taken, indices, NUM_VALUES: tl.constexpr):
    """Lowest index of the highest value of each row among those not `taken`, whose values are -inf."""
    is_highest = (values == tl.max(values, axis=1)[:, None]) & (taken == 0)
    return tl.minimum(tl.min(tl.where(is_highest, indices[None, :], NUM_VALUES), axis=1), NUM_VALUES - 1)


@triton.jit
def _in_best_groups(
    wanted, BLOCK: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUPS_PER_TOKEN: tl.constexpr,
    NUM_BEST: tl.constexpr,
):  # fmt: skip
    """`wanted`, with -inf for experts outside the token's best groups of experts."""
    by_group = tl.reshape(wanted, (BLOCK, GROUPS, GROUP_SIZE))
    strength = tl.max(by_group, axis=2)
    if NUM_BEST == 2 and GROUP_SIZE > 1:
        members = tl.arange(0, GROUP_SIZE)[None, None, :]
        first = tl.min(tl.where(by_group == strength[:, :, None], members, GROUP_SIZE), axis=2)
        strength += tl.max(tl.where(members == first[:, :, None], float("-inf"), by_group), axis=2)
    groups = tl.arange(0, GROUPS)
    is_best = tl.zeros((BLOCK, GROUPS), tl.int32)
    for _ in tl.static_range(GROUPS_PER_TOKEN):
        best = groups[None, :] == _first_of_highest(strength, is_best, groups, GROUPS)[:, None]
        is_best += best.to(tl.int32)
        strength = tl.where(best, float("-inf"), strength)
    return tl.reshape(tl.where(is_best[:, :, None] > 0, by_group, float("-inf")), (BLOCK, GROUPS * GROUP_SIZE))
