"""Other libraries' MoE layers, with our weights in them, as functions of tokens.

Each raises ImportError if its library is not installed (the extra `bench` installs them).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe import MoELayer

Layer = Callable[[Tensor], Tensor]
"""`[T, M]` from `[T, M]`."""


def transformers_mixtral(layer: MoELayer, implementation: str) -> tuple[Layer, nn.Module]:
    """transformers' Mixtral block, with `grouped_mm` or `eager` experts."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    spec = layer.spec
    config = MixtralConfig(
        hidden_size=spec.model_dim, intermediate_size=spec.hidden_dim, num_local_experts=spec.num_experts,
        num_experts_per_tok=spec.experts_per_token,
    )  # fmt: skip
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config).to(layer.router.dtype)
    weights = layer.experts
    with torch.no_grad():
        block.gate.weight.copy_(layer.router.t())
        block.experts.gate_up_proj.copy_(torch.cat((weights.w_gate, weights.w_in), 2).transpose(1, 2))
        block.experts.down_proj.copy_(weights.w_out.transpose(1, 2))
    return lambda x: block(x[None])[0], block


def torchtitan_moe(layer: MoELayer) -> tuple[Layer, nn.Module]:
    """torchtitan's MoE; it computes in bfloat16 for weights of any dtype."""
    from torchtitan.models.common import moe as titan_moe
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    spec = layer.spec
    experts = titan_moe.GroupedExperts.Config(
        dim=spec.model_dim, hidden_dim=spec.hidden_dim, num_experts=spec.num_experts
    )
    dispatcher = LocalTokenDispatcher.Config(num_experts=spec.num_experts, top_k=spec.experts_per_token)
    config = titan_moe.MoE.Config(
        num_experts=spec.num_experts,
        load_balance_coeff=None,
        routed_experts=titan_moe.RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
        router=titan_moe.TokenChoiceTopKRouter.Config(
            num_experts=spec.num_experts,
            gate=Linear.Config(in_features=spec.model_dim, out_features=spec.num_experts),
            top_k=spec.experts_per_token,
            score_func="softmax",
            route_norm=spec.experts_per_token > 1,
        ),
    )
    block = titan_moe.MoE(config).to(layer.router.dtype)
    inner, weights = block.routed_experts.inner_experts, layer.experts
    with torch.no_grad():
        block.router.gate.weight.copy_(layer.router.t())
        inner.w1_EFD.copy_(weights.w_gate.transpose(1, 2))
        inner.w3_EFD.copy_(weights.w_in.transpose(1, 2))
        inner.w2_EDF.copy_(weights.w_out.transpose(1, 2))
    return lambda x: block(x[None])[0], block


class _FeedForward(nn.Module):
    """One expert as DeepSpeed takes it."""

    def __init__(self, model_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.into = nn.Linear(model_dim, hidden_dim, bias=False)
        self.out = nn.Linear(hidden_dim, model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x).relu_())


def deepspeed_top2(layer: MoELayer, num_ranks: int = 1) -> tuple[Layer, nn.Module]:
    """DeepSpeed's top-2 MoE with capacity 2·S/E and the best second expert, over `num_ranks` ranks. With several ranks
    the default process group must exist, and our layer must hold the same experts per rank."""
    import deepspeed
    from deepspeed.moe.layer import MoE

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed("gloo", verbose=False, auto_mpi_discovery=False)
    spec = layer.spec
    block = MoE(
        spec.model_dim, _FeedForward(spec.model_dim, spec.hidden_dim), num_experts=spec.num_experts, k=2,
        ep_size=num_ranks,
        capacity_factor=1.0, min_capacity=4, top2_2nd_expert_sampling=False,
    )  # fmt: skip
    block.set_deepspeed_parallelism()
    block.to(layer.router.dtype)
    moe = block.deepspeed_moe
    with torch.no_grad():
        moe.gate.wg.weight.copy_(layer.router.t())
        for index, expert in enumerate(moe.experts.deepspeed_experts):
            expert.into.weight.copy_(layer.experts.w_in[index].t())
            expert.out.weight.copy_(layer.experts.w_out[index].t())
    return lambda x: block(x)[0], block
