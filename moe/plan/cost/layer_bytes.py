"""Bytes of layers and logits for one micro-batch, from the tensors saved for the backward pass."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from moe.plan.cost.context_exchange import kept_elements
from moe.plan.cost.skew import rank_skew
from moe.plan.cost.stages import Stage
from moe.plan.cost.units import Unit
from moe.plan.degrees import ShardCounts, WorkSplit
from moe.plan.profile import Profile
from moe.spec import JobSpec
from moe.spec.adapter_names import is_adapter
from moe.spec.block import AttentionDims, SavedWidths, SelectionDims
from moe.spec.language.indexer import QUERIES_AT_ONCE, SCORES_AT_ONCE
from moe.spec.parallel import ContextExchange

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float64": 8, "fp8": 2}
"""Bytes per activation element; fp8 narrows only operands of matrix products."""

_LOGITS, _LOGITS_ON_CPU = (1 << 26, 1 << 26), (1 << 18, 1 << 24)
"""Fewest and most logits per chunk of the loss: on a GPU enough to fill it; on a CPU at least what fits its cache,
at most 200 MB in three copies."""
_TOKENS = 256
"""Tokens per chunk of the loss, within these bounds: fewer make narrow products, more take memory and are no faster.
Loss and gradients of 2,048 tokens of width 512 over 4,096 words on two cores of an EPYC: 290 ms by 64, 209 by 256,
214 by 2,048; of 1,024 over 32,000 words 4,550 ms by 8, 1,360 by 64, 960 by 256."""

_BACKWARD_HIDDEN = {2: 2, 3: 4}
"""Hidden-sized temporaries in the backward pass of experts, by number of matrices: hidden states and their gradient;
with a gate, also the activated gate and both products' gradients."""


@cache
def loss_tokens(device_type: str, vocabulary: int) -> int:
    """Number of tokens per chunk of the loss."""
    lower, upper = (logits // vocabulary for logits in (_LOGITS_ON_CPU if device_type == "cpu" else _LOGITS))
    return max(1, min(max(lower, _TOKENS), upper))


class LayerBytes(NamedTuple):
    """Bytes of one layer for one micro-batch."""

    activations: int
    dispatch: int
    """Saved activations of experts and of routing."""
    workspace: int
    """Temporary bytes while the backward pass is in the layer."""

    @property
    def saved_bytes(self) -> int:
        return self.activations + self.dispatch


class LayerMemory:
    """Memory of layers, masks and logits of one job on one device type. `load_skew`: rows of the busiest expert over
    the mean."""

    def __init__(self, spec: JobSpec, device_type: str, profile: Profile, load_skew: float) -> None:
        self._kind, self._profile, self._load_skew = device_type, profile, load_skew
        self._m, self._width = spec.model.model_dim, BYTES_PER_ELEMENT[spec.train.dtype]
        self._row_tokens = int(spec.data.padded_tokens)
        self._packs_documents = profile.name == "ours" and spec.model.kind == "language"
        self._dropouts = 1 if getattr(spec.model, "dropout", 0) else 0
        self.layer_bytes = cache(self._layer_bytes)

    def attention_mask_bytes(
        self, stage: Stage, positions: int, context: int, context_exchange: ContextExchange
    ) -> int:
        """Attention masks of packed documents; CPUs only. Context ranks that exchange heads have those of whole rows,
        others make one for some hundred queries at a time."""
        if self._kind != "cpu" or not self._packs_documents or (context > 1 and context_exchange != "heads"):
            return 0
        attentions = (attention for unit, _ in stage.units for attention in unit.attentions)
        return mask_bytes(attentions, context * positions, self._row_tokens, self._width)

    def logit_bytes(self, positions: int, unit: Unit, tensor: int = 1) -> tuple[int, int]:
        """Return (saved bytes, temporary bytes of the loss) for a rank's share of a tensor group's positions.

        Chunked: copies of a chunk (`Unit.logit_copies`); the table's gradient and five hidden-state tensors around the
        last norms are saved. Otherwise: all logits, overwritten by their gradients, or the profile's `loss_bytes` each;
        the hidden states before and after the last norm are saved.
        """
        vocabulary = unit.vocabulary or 0
        if not self._profile.chunks_logits:
            loss_bytes = self._profile.loss_bytes
            bytes_per_logit = self._width if loss_bytes is None else loss_bytes[tensor > 1]
            norm_positions = positions * (tensor if self._profile.saves_gathered_tokens else 1)
            return self._m * self._width * (positions + norm_positions), bytes_per_logit * positions * vocabulary
        wide = max(4, self._width)  # the table's gradient and the loss
        chunk_positions = min(loss_tokens(self._kind, vocabulary), positions)
        weights = (*unit.weights, *unit.tied_weights)
        is_trained = any(weight.is_trained and not is_adapter(weight.name) for weight in weights)
        table_rows = vocabulary if is_trained else 0
        saved_bytes = self._m * (wide * table_rows + 5 * self._width * positions)
        return saved_bytes, unit.logit_copies * wide * chunk_positions * vocabulary

    def _layer_bytes(
        self, unit: Unit, positions: int, split: WorkSplit, selective: bool, context_exchange: ContextExchange
    ) -> LayerBytes:
        """Bytes of one layer for one micro-batch; `positions` are those of a tensor group."""
        tensor, context, expert, expert_tensor = split
        width, m, tokens = self._width, self._m, positions // tensor
        elements = self._dropouts * (len(unit.attentions) + 1) * tokens * m
        elements += unit.extra_norms * tokens * m + unit.adapted_widths(tensor) * positions
        decoded_bytes = unit.decoded_bytes(
            ShardCounts(tensor, 1, expert, expert_tensor), width
        )  # for the current product
        on_cpu, attention_bytes, workspace_bytes = self._kind == "cpu", 0, 0
        for attention in unit.attentions:
            attention_bytes += saved_attention_bytes(
                attention, m, positions, tensor, width, profile=self._profile, on_cpu=on_cpu, selective=selective,
                sequence_tokens=self._row_tokens,
            )  # fmt: skip
            if context > 1 and self._profile.name == "ours":
                attention_bytes += int(width * positions * kept_elements(attention, context_exchange, context, tensor))
            workspace_bytes = max(
                workspace_bytes,
                attention_workspace_bytes(attention, positions, self._row_tokens, tensor, self._profile),
            )
        saved_hidden = self._profile.saved_hidden
        if (dims := unit.feed_forward) is not None:
            hidden_elements = dims.hidden * positions // tensor
            saved_elements = 0 if selective else saved_hidden[dims.num_matrices] * hidden_elements
            elements += tokens * m + (positions if self._profile.saves_gathered_tokens else tokens) * m + saved_elements
            recomputed_hidden = selective * saved_hidden[dims.num_matrices] * hidden_elements
            work = (
                self._profile.backward_hidden[dims.num_matrices] * hidden_elements
                + recomputed_hidden
                + 2 * positions * m
            )
            workspace_bytes -= width * elements  # freed before the backward pass reaches attention
            # CPUs without bfloat16 products cast the operands and the product to float32: hidden states, model-sized
            # states and the matrix. The plan assumes such a CPU, as it cannot know.
            widens = on_cpu and width < 4 and self._profile.name == "ours"
            widened_bytes = 4 * widens * (hidden_elements + positions * m + m * dims.hidden // tensor)
            return LayerBytes(
                attention_bytes + width * elements,
                0,
                max(workspace_bytes, width * work + widened_bytes) + decoded_bytes,
            )
        if (moe := unit.moe) is None:
            return LayerBytes(attention_bytes + width * elements, 0, workspace_bytes + decoded_bytes)
        rows = int(tokens * moe.experts_per_token * expert_tensor * rank_skew(self._load_skew, moe, expert))
        hidden_elements = rows * moe.hidden_dim // expert_tensor
        # Saved: tokens before the norm; normalized tokens for a trained router, shared experts or latents, each if they
        # have norms of their own; the latents that are projected back; a float32 copy for peers' routers, and ours with
        # jitter or an adapter; the experts' input rows and the outputs of their first matrices; scores and choices.
        routes = unit.trains("router")
        elements += (1 + (routes or moe.shared_hidden_dim is not None or moe.latent_dim is not None)) * tokens * m
        elements += ((routes and moe.router_norm) + (moe.branch_norms and moe.latent_dim is not None)) * tokens * m
        elements += tokens * (moe.latent_dim or 0)
        keeps_wide_tokens = self._profile.name != "ours" or moe.input_jitter > 0 or unit.trains("router_lora")
        router = 4 * tokens * m if width < 4 and routes and keeps_wide_tokens else 0
        routing = positions * (8 * moe.num_experts + 16 + 40 * moe.experts_per_token)
        first_products = (moe.num_matrices - 1) * hidden_elements
        saved_elements = rows * moe.expert_dim + (0 if selective else first_products)
        if moe.apply_gates_to == "inputs":  # rows before they are multiplied, for the gradient of their gates
            saved_elements += tokens * moe.experts_per_token * expert_tensor * moe.expert_dim
        shared_elements = tokens * (moe.shared_hidden_dim or 0)
        saved_shared_hidden = 0 if selective else self._profile.saved_shared_hidden[moe.num_matrices] * shared_elements
        # Temporary: received rows and their gradients, with an all-to-all also the rows sent, one copy for all ranks of
        # an expert-tensor group; recomputed first products; with `has_separate_weight_gradients`, the gradient of one
        # matrix. The tensors of shared experts are freed by then.
        sent_rows = 2 * rows // expert_tensor if expert * expert_tensor > 1 else 0
        moved_elements = (2 * rows + sent_rows) * moe.expert_dim + 2 * tokens * m
        work = (
            _BACKWARD_HIDDEN[moe.num_matrices] * hidden_elements
            + moved_elements
            + selective * first_products
            - saved_shared_hidden
        )
        matrix = moe.num_experts // expert * moe.expert_dim * moe.hidden_dim // expert_tensor
        matrix *= self._profile.has_separate_weight_gradients
        in_experts = width * (saved_elements + saved_shared_hidden) + router + routing
        workspace_bytes -= width * elements + in_experts
        return LayerBytes(
            attention_bytes + width * elements,
            in_experts,
            max(workspace_bytes, width * (max(0, work) + matrix)) + decoded_bytes,
        )


def saved_attention_bytes(
    dims: AttentionDims,
    m: int,
    positions: int,
    tensor: int,
    width: int,
    *,
    profile: Profile,
    on_cpu: bool,
    selective: bool,
    sequence_tokens: int,
) -> int:
    """Saved bytes on one of `tensor` ranks that share `positions` of `m` channels: the norm's input (the rank's
    share), its output (whole if gathered tokens are kept), and tensors of the rank's heads. `width`: bytes per
    element; `sequence_tokens`: length of a row."""
    if profile.name == "ours" and dims.saved_widths is not None:
        saved_widths = dims.saved_widths
        if dims.selects(sequence_tokens):  # outputs of blocks are recomputed, from inputs of any dtype
            inputs = saved_widths.fused_inputs_outputs - dims.values
            if dims.selection is not None and dims.gathers(sequence_tokens):  # one key for all heads
                inputs, gathered = dims.queries, saved_widths.gathered + dims.selection.gathered_key
                saved_widths = replace(saved_widths, gathered=gathered)
            saved_widths, on_cpu = replace(saved_widths, fused_inputs_outputs=inputs, wide=0), False
        saved_bytes = _by_ours(dims, saved_widths, m, positions, tensor, width, on_cpu=on_cpu)
        return saved_bytes + _indexer_bytes(dims, positions, tensor, width, sequence_tokens)
    saved_bytes = width * _elements(dims, m, positions, tensor, profile, selective=selective)
    if profile.name == "ours" and on_cpu and width < 4:
        # CPUs without bfloat16 products attend in float32; the outputs are saved in the compute dtype as well.
        wide_elements = dims.queries + dims.kept_keys_and_values + dims.values
        saved_bytes += positions * ((4 - width) * wide_elements + width * dims.values) // tensor
    return saved_bytes


def _elements(dims: AttentionDims, m: int, positions: int, tensor: int, profile: Profile, *, selective: bool) -> int:
    """Queries, keys, values and outputs of the rank's heads; what derives from latents may be recomputed."""
    split = (
        dims.values
        if selective and profile.recomputes_latents and dims.latent
        else dims.queries + dims.kept_keys_and_values + dims.rotated_copies + dims.values
    )
    gathered_width = m if profile.saves_gathered_tokens else m // tensor
    return positions * (m // tensor + gathered_width + split // tensor + dims.latent)


def _by_ours(
    dims: AttentionDims, saved_widths: SavedWidths, m: int, positions: int, tensor: int, width: int, *, on_cpu: bool
) -> int:
    tokens, wide = positions // tensor, max(4, width)
    gathers_hidden = dims.gathered is None
    normed_elements = tokens * m if dims.projects_local_tokens and (tensor > 1 or not gathers_hidden) else 0
    normed_elements += positions * m if gathers_hidden else 0
    narrow = (
        tokens * (m + saved_widths.of_tokens)
        + normed_elements
        + positions * (saved_widths.gathered + saved_widths.unfused // tensor)
    )
    in_float32 = tokens * saved_widths.of_tokens_wide + positions * saved_widths.wide // tensor
    if not on_cpu:
        narrow += positions * saved_widths.fused_inputs_outputs // tensor
    elif width == wide:
        narrow += positions * saved_widths.fused_on_cpu // tensor
    else:
        in_float32 += positions * saved_widths.fused_on_cpu // tensor
        narrow += positions * saved_widths.narrow_outputs // tensor
    if tensor == 1:
        narrow += positions * saved_widths.normed_together
    else:
        in_float32 += 2 * positions * saved_widths.normed_together // tensor
    return width * narrow + wide * in_float32


def _indexer_bytes(dims: AttentionDims, positions: int, tensor: int, width: int, sequence_tokens: int) -> int:
    """Saved bytes of a layer's own indexer: the selection of each query; and with a loss, gradients of the factors of
    its scores, and the key before its norm."""
    selection = dims.selection
    if selection is None or not selection.heads:
        return 0
    selection_bytes = 4 * selection.top_k * positions if dims.selects(sequence_tokens) else 0
    if not selection.is_trained:
        return selection_bytes
    tokens, wide = positions // tensor, max(4, width)
    narrow = tokens * (selection.heads + 1) * selection.head_dim + positions * selection.head_dim
    return selection_bytes + width * narrow + wide * tokens * (selection.heads + 2)


def _selection_workspace_bytes(
    dims: AttentionDims, selection: SelectionDims, positions: int, sequence_tokens: int, tensor: int
) -> int:
    """Temporary bytes for a block of queries: of attention to selected tokens, its mask, boolean and additive, and its
    gradients of all keys and values; or the gathered keys and values with their gradients; of an indexer's loss, three
    to four copies of its scores in float32."""
    num_queries = min(QUERIES_AT_ONCE, sequence_tokens) * (positions // sequence_tokens)
    pairs = num_queries * sequence_tokens
    workspace_bytes = 0
    if dims.gathers(sequence_tokens):
        workspace_bytes = 16 * min(SCORES_AT_ONCE, num_queries * selection.top_k * selection.gathered_width)
    elif dims.selects(sequence_tokens):
        workspace_bytes = 5 * pairs + 8 * positions * dims.queries // tensor
    if selection.is_trained and selection.heads:
        scores = min(SCORES_AT_ONCE, pairs * max(selection.heads, dims.heads // tensor))
        workspace_bytes = max(workspace_bytes, 14 * scores)
    return workspace_bytes


def mask_bytes(attentions: Iterable[AttentionDims], positions: int, sequence_tokens: int, width: int) -> int:
    """Attention masks of packed documents, boolean and additive, shared by layers of equal window or chunk. CPUs only:
    GPUs use block masks."""
    windows = {
        (dims.window, dims.in_chunks) if not dims.in_chunks or (dims.window or 0) < sequence_tokens else (None, False)
        for dims in attentions
        if dims.saved_widths is not None and not dims.chunk and not dims.selects(sequence_tokens)
    }
    return len(windows) * positions * sequence_tokens * (1 + max(4, width))


def attention_workspace_bytes(
    dims: AttentionDims, positions: int, sequence_tokens: int, tensor: int, profile: Profile
) -> int:
    """Temporary bytes of our backward pass: the current chunks of linear attention, or block of sparse attention."""
    if profile.name != "ours" or dims.saved_widths is None:
        return 0
    if dims.selection is not None:
        return _selection_workspace_bytes(dims, dims.selection, positions, sequence_tokens, tensor)
    if not dims.saved_widths.backward_temporaries:
        return 0
    at_once = min(dims.saved_widths.temporary_positions, sequence_tokens) * (positions // sequence_tokens)
    return 4 * at_once * dims.saved_widths.backward_temporaries // tensor
