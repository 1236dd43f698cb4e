"""The mixture-of-experts layer: group, score, route, dispatch."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe.dispatch import build_dispatcher
from moe.experts import Experts
from moe.parallel import Layout
from moe.random import init_uniform_
from moe.routing import Routing, TokenContext, route
from moe.spec import MoESpec


class MoELayer(nn.Module):
    """A layer of experts, of which each token uses at most K. It keeps no state between calls."""

    def __init__(
        self,
        spec: MoESpec,
        layer: int = 0,
        *,
        layout: Layout | None = None,
        name: str = "moe",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        layout = layout or Layout.single()
        self.spec, self.layer = spec, layer
        self.router = nn.Parameter(
            torch.empty(spec.model_dim, spec.num_experts, dtype=dtype, device=layout.device)
        )
        init_uniform_(self.router, spec.model_dim**-0.5, seed, f"{name}.router")
        self.experts = Experts(spec, layout, name=f"{name}.experts", seed=seed, dtype=dtype)
        self.dispatch = build_dispatcher(layout)

    def forward(self, x: Tensor, tokens: TokenContext | None = None) -> tuple[Tensor, Routing]:
        """(y in the shape of `x` `[..., M]`, the routing).

        Ids and padding in the shape of `x` without M (or none) leave the groups to `spec.group_tokens`: the
        tokens in order are cut into runs of that many, the last filled up with padding. Where they are `[G, S]`
        and `x` is not `[G, S, M]` (give it flat, `[T, M]`), their rows are the groups; the last may reach beyond
        the tokens of `x`, and is padding there. Raises ValueError where the shapes do not go together.
        """
        if x.shape[-1] != self.spec.model_dim:
            raise ValueError(f"x {tuple(x.shape)} must end in model_dim (={self.spec.model_dim})")
        x_GSM, tokens = _into_groups(x, tokens or TokenContext(), self.spec.group_tokens)
        wide = torch.promote_types(x.dtype, self.router.dtype)  # the router is never narrower than float32
        logits_GSE = x_GSM.to(wide) @ self.router.to(wide)
        routing = route(logits_GSE, self.spec, tokens, self.layer)
        y_TM = self.dispatch(x_GSM.reshape(-1, x.shape[-1]), routing, self.experts)
        return y_TM[: x.numel() // x.shape[-1]].view(x.shape), routing


def _into_groups(x: Tensor, tokens: TokenContext, group_tokens: int) -> tuple[Tensor, TokenContext]:
    """`[G, S, M]` and its context. The positions that fill up a ragged last group count as padding."""
    shape, width = x.shape[:-1], x.shape[-1]
    num_tokens = shape.numel()
    described = tokens.padding if tokens.padding is not None else tokens.ids
    if tokens.ids is not None and described is not None and tokens.ids.shape != described.shape:
        raise ValueError(
            f"ids {tuple(tokens.ids.shape)} must be in the shape of padding {tuple(described.shape)}"
        )
    if described is not None and described.dim() == 2 and described.shape != shape:
        missing = described.numel() - num_tokens
        if not 0 <= missing < max(1, described.shape[1]) or (missing and tokens.padding is None):
            raise ValueError(f"tokens in groups {tuple(described.shape)} do not describe x {tuple(x.shape)}")
        return _fill_up(x, missing).view(*described.shape, width), tokens

    group_tokens = min(group_tokens, max(1, num_tokens)) if not tokens.training else group_tokens
    num_groups = -(-num_tokens // group_tokens)
    missing = num_groups * group_tokens - num_tokens
    ids = torch.arange(num_tokens, device=x.device) if tokens.ids is None else tokens.ids.reshape(-1)
    padding = tokens.padding
    padding = ids.new_zeros(num_tokens, dtype=torch.bool) if padding is None else padding.reshape(-1)
    if missing:
        ids = functional.pad(ids, (0, missing))
        padding = functional.pad(padding, (0, missing), value=True)
    in_groups = (num_groups, group_tokens)
    context = TokenContext(
        ids.view(in_groups), padding.view(in_groups), tokens.step, tokens.seed, tokens.training
    )
    return _fill_up(x, missing).view(*in_groups, width), context


def _fill_up(x: Tensor, missing: int) -> Tensor:
    """`[T + missing, M]`: the tokens of `x` `[..., M]`, then zeros."""
    x_TM = x.reshape(-1, x.shape[-1])
    return functional.pad(x_TM, (0, 0, 0, missing)) if missing else x_TM
