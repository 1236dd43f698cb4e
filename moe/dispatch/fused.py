"""Dispatch on one GPU by kernels that gather a token's row where they multiply it: rows are neither copied nor counted
by the host."""

from torch import Tensor

from moe.experts import FUSED, ExpertComputation, LocalExperts
from moe.kernels.support import ACTIVATIONS, MAX_EXPERTS, has_fast_products, has_kernels
from moe.routing import Choices
from moe.routing.routing import ChoicesOfTokens


def fused_computation(
    x: Tensor, choices: Choices, experts: LocalExperts
) -> tuple[ChoicesOfTokens, ExpertComputation] | None:
    """(choices, computation that returns expert outputs summed by token, for tokens `x` `[T, M]` and the choices'
    weights). None where the kernels do not apply: on CPUs, for other GPUs, dtypes, activations and quantized weights,
    if experts choose tokens, and if a layer of these experts was measured to be slower with them."""
    weights, by_token = experts.weights, choices.by_token
    if (
        not has_kernels(x, "experts")
        or by_token is None
        or not has_fast_products(x.dtype)
        or experts.activation.name not in ACTIVATIONS
        or weights.is_quantized
        or weights.w_in.shape[0] > MAX_EXPERTS
        or (experts.costs and FUSED not in experts.costs)
    ):
        return None
    from moe.kernels.configs import Configs
    from moe.kernels.experts import FusedComputation
    from moe.kernels.rows import RowMap

    rows = RowMap.from_choices(by_token.expert, by_token.kept, weights.w_in.shape[0])
    configs = Configs.for_device(x.device, x.dtype)
    return by_token, FusedComputation(rows, experts.activation, configs, experts.recompute)
