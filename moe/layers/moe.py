"""Mixture-of-experts layer: token groups, router logits, routing, dispatch, experts, combination."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from moe.dispatch import Dispatcher, LocalDispatcher, build_dispatcher
from moe.dispatch.dispatcher import FEW_ROWS, dispatch_small
from moe.experts import Experts, build_activation
from moe.layers.adapter_dropout import AdapterDropout, DropoutKey
from moe.layers.draws import apply_jitter
from moe.layers.kernel_routing import route_by_kernels
from moe.layers.linear import add_adapter, operand, product, wide_linear
from moe.layers.norm import RMSNorm, rms_norm
from moe.layers.shared_experts import SharedExperts
from moe.overrides import overridable
from moe.parallel import Layout, SequenceShard, as_dtype, declare
from moe.routing import Choices, Routing, RoutingState, TokenContext, build_router, follow_load
from moe.routing.balance import with_auxiliary_losses
from moe.routing.checks import check_inference, is_dense, kind_of
from moe.routing.router import resolve_context
from moe.spec import MoESpec

_PARAMETERS = (
    "router", "logit_bias", "router_scale", "expert_scale", "latent_in", "latent_out", "router_lora_a", "router_lora_b",
)  # fmt: skip
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class MoELayer(nn.Module):
    """Mixture-of-experts layer with optional shared experts.

    Calls change only the traffic counters (`dispatch.take_traffic`); router buffers change in `end_step`. A layer made
    on the meta device gets its values when it is applied to a layout.
    """

    router: nn.Parameter
    """`[M, E]`"""
    logit_bias: nn.Parameter | None
    """`[E]`"""
    router_scale: nn.Parameter | None
    """`[M]`: scale of the router's normalized input, times √M."""
    expert_scale: nn.Parameter | None
    """`[E]`: factor of each expert's weights."""
    latent_in: nn.Parameter | None
    """`[M, latent]`: projection of the experts' input, with the next."""
    latent_out: nn.Parameter | None
    """`[latent, M]`"""
    router_lora_a: nn.Parameter | None
    """`[r, M]`: LoRA adapter of the router, with the next."""
    router_lora_b: nn.Parameter | None
    """`[E, r]`"""
    lora_scales: Mapping[str, float] = MappingProxyType({})
    """Scale of that adapter, by the name `router`."""
    router_dropout: AdapterDropout | None = None
    """Dropout of the router adapter's input."""
    tensor_group: dist.ProcessGroup | None = None
    router_bias: Tensor | None
    last_load: Tensor | None
    draws_by_key = True
    begin_with_zeros = ("router_bias", "last_load")
    """Buffers initialized to zeros after construction on the meta device."""

    def __init__(
        self, spec: MoESpec, layer: int = 0, *, dtype: torch.dtype = torch.float32, norm_eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.spec, self.layer, self.norm_eps = spec, layer, norm_eps
        for name in _PARAMETERS:
            self.register_parameter(name, None)
        self.norm, self.post_norm, self.shared_norm, self.shared_post_norm = (
            RMSNorm(norm_eps) if spec.branch_norms else None for _ in range(4)
        )
        bias = torch.zeros(spec.num_experts) if spec.routing.has_selection_bias else None
        self.register_buffer("router_bias", bias)
        load = torch.zeros(spec.num_experts, dtype=torch.int64) if spec.routing.keeps_load else None
        self.register_buffer("last_load", load)
        self.route = build_router(spec)
        activation = build_activation(spec.activation, spec.activation_settings)
        self.experts = Experts(activation, scales_inputs=spec.apply_gates_to == "inputs")
        self.shared = None if spec.shared_hidden_dim is None else SharedExperts(activation)
        declare(self, spec.parameters(), dtype)
        self.dispatch: Dispatcher = LocalDispatcher()
        self._is_single_rank = True

    def set_layout(self, layout: Layout) -> None:
        self.dispatch = build_dispatcher(layout, f"MoE layer {self.layer}")
        self._is_single_rank = layout.world_size == 1

    def forward(
        self, x: Tensor, tokens: TokenContext | None = None, shard: SequenceShard | None = None
    ) -> tuple[Tensor, Routing]:
        """Return (`y` in the shape of `x` `[..., M]`, routing).

        Backpropagating through `y` in training includes the weighted auxiliary losses; the copies on `Routing` are
        detached, for logging.

        If ids and padding are None, flat, or in the shape of `x` without M, tokens are cut in order into groups of
        `spec.group_tokens`, the last one padded. In any other shape `[G, S]`, their rows are the groups, and the last
        may extend beyond the tokens of `x`, with padding; the reversed shape is refused as ambiguous, unless a side is
        1. A sequence has `tokens.sequence_tokens` positions, by default the last dimension of `x` before M, if `x` has
        several. Padded tokens count as zeros, whatever their values. Raises ValueError for invalid arguments and
        mismatched shapes.

        Tensor-parallel ranks receive the same `x`, process a share of its tokens each, and return the same `y`. With
        `shard`, `x` and `y` are this rank's share `[t, M]` of the tokens; ids, padding and routing cover all of them.
        """
        self._check(x, shard)
        tokens = resolve_context(tokens, x.device)
        check_inference("tokens.padding", tokens.padding, chain((x,), self.parameters()))
        x_TM, shape = x.reshape(-1, x.shape[-1]), x.shape[:-1]
        x_is_shard = shard is not None
        if shard is None:
            shard = SequenceShard(shape.numel(), self.tensor_group, f"MoE layer {self.layer}")
            x_TM = shard.split(x_TM)
        else:
            shape = torch.Size((shard.num_tokens,))
        has_padding = tokens.padding is not None
        ids_GS, tokens = _group_tokens(shape, tokens, self.spec.group_tokens, x.device)
        if has_padding:
            assert tokens.padding is not None
            padded_T = shard.take(tokens.padding.reshape(-1)[: shard.num_tokens])
            x_TM = x_TM.masked_fill(padded_T[:, None], 0.0)  # multiplied by zero, NaN and inf would remain
        ids_T = shard.take(ids_GS.reshape(-1)[: shard.num_tokens])
        logits_TE = shard.gather_all(self._logits(x_TM, ids_T, tokens))
        logits_GSE = _pad_rows(logits_TE, ids_GS.numel()).view(*ids_GS.shape, self.spec.num_experts)
        routing = self.route_tokens(logits_GSE, tokens)
        if self.expert_scale is not None:
            routing = routing.scale_weights(self.expert_scale)
        # Every tensor and context rank routes all tokens, and dispatches its own share of them.
        x_TM = with_auxiliary_losses(x_TM, routing, self.spec, tokens, shard.num_token_ranks)
        choices = routing.choices
        if len(x_TM) < choices.num_tokens:
            choices = choices.select_tokens(shard.take(torch.arange(shard.num_tokens, device=x_TM.device)))
        dropout_key = DropoutKey.from_tokens(tokens, ids_T)
        runs_beside = self.shared is not None and self.dispatch.begin(choices)  # while ranks exchange their counts
        shared_TM = self._shared_outputs(x_TM, dropout_key) if runs_beside else None
        y_TM = self._from_latent(self.run_experts(self._to_latent(x_TM), choices))
        if not runs_beside:
            shared_TM = self._shared_outputs(x_TM, dropout_key)
        y_TM = y_TM if shared_TM is None else y_TM + shared_TM
        routing = replace(
            routing, aux_loss=routing.aux_loss.detach(), z_loss=routing.z_loss.detach(), weighted_loss=None
        )
        y_TM = y_TM if x_is_shard else shard.gather_results(y_TM)
        # Not a view to autograd, so that callers may modify it in place: FSDP's hook that gathers parameters for the
        # backward pass does not follow views. No operation that produced y has saved it.
        return torch.ops.aten._unsafe_view(y_TM, x.shape), routing

    @overridable
    def route_tokens(self, logits_GSE: Tensor, tokens: TokenContext) -> Routing:
        """Choose the experts of each token."""
        routing = route_by_kernels(self.route, self.spec, logits_GSE, tokens, self.state)
        return self.route(logits_GSE, tokens, self.layer, self.state) if routing is None else routing

    @overridable
    def run_experts(self, x_TM: Tensor, choices: Choices) -> Tensor:
        """Sum of the outputs of each token's experts, weighted or of weighted inputs, in the shape of `x` `[T, M]`, or
        of latents."""
        rows_nM, weight_n, computation, combiner = self.dispatch(x_TM, choices, self.experts)
        outputs_nM = self.experts(rows_nM, weight_n, computation)
        del rows_nM  # freed before the outputs are combined
        return combiner.combine(outputs_nM)

    @overridable
    def decode_forward(self, x_TM: Tensor, tokens: TokenContext) -> Tensor | None:
        """Return `y` `[T, M]` as `forward` does, without routing statistics and with rows laid out by the host, or None
        where this fast path does not apply. It is for few tokens on a CPU and one rank, without gradients, padding,
        recorded or replayed routing or forward hooks."""
        is_short = not (
            tokens.training
            or torch.is_grad_enabled()
            or x_TM.device.type != "cpu"
            or x_TM.shape[0] * self.spec.experts_per_token > FEW_ROWS
            or not self._is_single_rank  # other ranks join this layer's collectives, however many rows this one has
            or self._forward_hooks
            or (tokens.padding is not None and bool(tokens.padding.any()))
        )
        if not is_short:
            return None
        wide = torch.promote_types(x_TM.dtype, torch.promote_types(self.router.dtype, torch.float32))
        router_input_TM = as_dtype(self._router_input(x_TM), wide)
        logits_TE = router_input_TM @ as_dtype(self.router, wide)
        logits_TE = self._add_router_adapter(logits_TE, router_input_TM)
        if self.logit_bias is not None:
            logits_TE += self.logit_bias
        if (inferred_routing := self.route.choose_for_inference(logits_TE[None], self.state)) is None:
            return None
        expert, weight = inferred_routing
        if self.expert_scale is not None:
            weight = weight * self.expert_scale.to(weight.dtype)[expert]
        if (y := dispatch_small(self._to_latent(x_TM), expert[0], weight[0], self.experts)) is None:
            return None
        y_TM, shared_TM = self._from_latent(y), self._shared_outputs(x_TM)
        return y_TM if shared_TM is None else y_TM + shared_TM

    @property
    def state(self) -> RoutingState:
        """Router state from earlier steps."""
        return RoutingState(self.router_bias, self.last_load)

    def end_step(self, requested_load: Tensor, found_inf: Tensor | None = None) -> None:
        """Update the router state after a step, unless `found_inf` (scalar on the device) is 1. `requested_load` `[E]`,
        any dtype: choices of each expert in the global batch."""
        if self.router_bias is not None and self.spec.routing.bias_rate and self.router.requires_grad:
            follow_load(self.router_bias, requested_load, self.spec.routing.bias_rate, found_inf)
        if self.last_load is not None:
            load = requested_load.to(self.last_load.dtype)
            self.last_load.copy_(load if found_inf is None else torch.where(found_inf != 0, self.last_load, load))

    def _check(self, x: Tensor, shard: SequenceShard | None) -> None:
        if not is_dense(x) or x.dtype not in _DTYPES:
            dtypes = ", ".join(map(str, _DTYPES))
            raise ValueError(f"x (={kind_of(x)}) must be a dense tensor of {dtypes}; convert it")
        if x.dim() == 0 or x.shape[-1] != self.spec.model_dim:
            raise ValueError(f"x {tuple(x.shape)} must end in model_dim (={self.spec.model_dim})")
        if x.device != self.router.device:
            raise ValueError(f"x (on {x.device}) must be on {self.router.device}, like the layer; move it")
        check_inference("x", x, chain((x,), self.parameters()))
        if not isinstance(shard, SequenceShard | None):
            raise ValueError(f"shard (={type(shard).__name__}) must be a SequenceShard, or None")
        if shard is None:
            return
        shard.check()
        if x.shape[:-1] != (shard.stop - shard.first,):
            raise ValueError(f"x {tuple(x.shape)} must be this rank's share [{shard.stop - shard.first}, M]")

    def _logits(self, x_TM: Tensor, ids_T: Tensor, tokens: TokenContext) -> Tensor:
        """Router logits `[T, E]`, at least float32."""
        x_TM = self._router_input(x_TM)
        wide = torch.promote_types(x_TM.dtype, torch.promote_types(self.router.dtype, torch.float32))
        bias = None if self.logit_bias is None else self.logit_bias.to(wide)
        router_EM = self.router.to(wide).t()
        if x_TM.device.type == "cpu":
            # Else the backward pass multiplies by a transposed tall x, which is five times slower in BLAS.
            router_EM = router_EM.contiguous()
        has_jitter = bool(self.spec.input_jitter) and tokens.training
        if x_TM.dtype != wide and not has_jitter and self.router_lora_a is None:
            return wide_linear(x_TM, router_EM, bias)
        x_TM = x_TM.to(wide)
        if has_jitter:
            x_TM = apply_jitter(x_TM, self.spec.input_jitter, ids_T, tokens, self.layer)
        logits_TE = functional.linear(x_TM, router_EM, bias)
        return self._add_router_adapter(logits_TE, x_TM, DropoutKey.from_tokens(tokens, ids_T))

    def _router_input(self, x_TM: Tensor) -> Tensor:
        """The router's input: normalized tokens, or the tokens themselves."""
        if self.router_scale is None:
            return x_TM
        return rms_norm(x_TM, self.router_scale * self.spec.model_dim**-0.5, self.norm_eps)

    def _to_latent(self, x_TM: Tensor) -> Tensor:
        """The experts' inputs: projections of the tokens, or the tokens themselves, normalized if experts have norms of
        their own."""
        x_TM = x_TM if self.norm is None else self.norm(x_TM)
        return x_TM if self.latent_in is None else product(x_TM, operand(self.latent_in, x_TM.dtype))

    def _from_latent(self, y: Tensor) -> Tensor:
        """Outputs of routed experts `[T, M]`, from those in latents."""
        y_TM = y if self.latent_out is None else product(y, operand(self.latent_out, y.dtype))
        return y_TM if self.post_norm is None else self.post_norm(y_TM)

    def _shared_outputs(self, x_TM: Tensor, dropout_key: DropoutKey | None = None) -> Tensor | None:
        """Outputs of the shared experts `[T, M]` for `x` `[T, M]`; None without shared experts."""
        if self.shared is None:
            return None
        shared_TM = self.shared(x_TM if self.shared_norm is None else self.shared_norm(x_TM), dropout_key)
        return shared_TM if self.shared_post_norm is None else self.shared_post_norm(shared_TM)

    def _add_router_adapter(self, logits_TE: Tensor, x_TM: Tensor, dropout_key: DropoutKey | None = None) -> Tensor:
        a, b, dropout = self.router_lora_a, self.router_lora_b, self.router_dropout
        masks = None if dropout is None else dropout.masks_for(dropout_key)
        return add_adapter(logits_TE, x_TM, a, b, self.lora_scales.get("router", 0.0), masks)


def _group_tokens(
    shape: torch.Size, tokens: TokenContext, group_tokens: int, device: torch.device
) -> tuple[Tensor, TokenContext]:
    """(ids `[G, S]`, context with ids and padding in groups) for tokens in `shape`. Positions that fill up the last
    group are padding."""
    num_tokens, sequence_tokens = shape.numel(), tokens.sequence_tokens
    if sequence_tokens is None and len(shape) > 1 and shape[-1]:
        sequence_tokens = shape[-1]
    descriptor = tokens.padding if tokens.padding is not None else tokens.ids
    if tokens.ids is not None and descriptor is not None and tokens.ids.shape != descriptor.shape:
        raise ValueError(f"ids {tuple(tokens.ids.shape)} must have the shape of padding {tuple(descriptor.shape)}")
    is_in_order = descriptor is None or descriptor.shape in (shape, (num_tokens,))
    if descriptor is not None and not is_in_order:
        is_reversed = descriptor.shape == shape[::-1]
        if descriptor.dim() != 2 or (is_reversed and 1 not in shape):
            remedy = "transpose them" if is_reversed else "reshape them"
            if descriptor.dim() == 2:  # rows may be groups, in another token order
                remedy = f"pass x flat, [T, M], if rows are groups, or {remedy} if they are not"
            raise ValueError(
                f"ids and padding {tuple(descriptor.shape)} must have the shape {tuple(shape)} of x "
                f"without M, flat, or in groups [G, S]: {remedy}"
            )
        missing = descriptor.numel() - num_tokens
        if not 0 <= missing < max(1, descriptor.shape[1]) or (missing and tokens.padding is None):
            raise ValueError(
                f"tokens in groups {tuple(descriptor.shape)} do not describe x {(*shape, 'M')}".replace("'", "")
            )
        return tokens.keys(descriptor), replace(tokens, sequence_tokens=sequence_tokens)

    group_tokens = min(group_tokens, max(1, num_tokens)) if not tokens.training else group_tokens
    grouped_shape = (-(-num_tokens // group_tokens), group_tokens)
    ids = torch.arange(num_tokens, device=device) if tokens.ids is None else tokens.ids.reshape(-1)
    padding = None if tokens.padding is None else tokens.padding.reshape(-1)
    missing = grouped_shape[0] * group_tokens - num_tokens
    if missing:
        ids = functional.pad(ids, (0, missing))
        padding = ids.new_zeros(num_tokens, dtype=torch.bool) if padding is None else padding
        padding = functional.pad(padding, (0, missing), value=True)
    ids = ids.view(grouped_shape)
    padding = None if padding is None else padding.view(grouped_shape)
    return ids, replace(tokens, ids=ids, padding=padding, sequence_tokens=sequence_tokens)


def _pad_rows(logits_TE: Tensor, num_rows: int) -> Tensor:
    """`logits_TE`, padded with rows of zeros to `[num_rows, E]`."""
    missing = num_rows - logits_TE.shape[0]
    return functional.pad(logits_TE, (0, 0, 0, missing)) if missing else logits_TE
