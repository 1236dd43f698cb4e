"""Activation bytes that attention saves for one micro-batch."""

from collections.abc import Iterable

from moe.plan.profile import Profile
from moe.spec.block import AttentionDims, KeptWidths


def kept_bytes(
    dims: AttentionDims,
    m: int,
    positions: int,
    tensor: int,
    width: int,
    *,
    profile: Profile,
    on_cpu: bool,
    selective: bool,
) -> int:
    """Saved bytes on one of `tensor` ranks that share `positions` of `m` channels: the norm's input (the rank's
    share), its output (whole if gathered tokens are kept), and tensors of the rank's heads. `width`: bytes per
    element."""
    if profile.name == "ours" and dims.kept is not None:
        return _by_ours(dims, dims.kept, m, positions, tensor, width, on_cpu=on_cpu)
    return width * _elements(dims, m, positions, tensor, profile, selective=selective)


def _elements(dims: AttentionDims, m: int, positions: int, tensor: int, profile: Profile, *, selective: bool) -> int:
    """Queries, keys, values and outputs of the rank's heads; what derives from latents may be recomputed."""
    split = (
        dims.values
        if selective and profile.recomputes_latents and dims.latent
        else dims.queries + dims.kept_keys_and_values + dims.rotated + dims.values
    )
    gathered_width = m if profile.keeps_gathered_tokens else m // tensor
    return positions * (m // tensor + gathered_width + split // tensor + dims.latent)


def _by_ours(
    dims: AttentionDims, kept_widths: KeptWidths, m: int, positions: int, tensor: int, width: int, *, on_cpu: bool
) -> int:
    tokens, wide = positions // tensor, max(4, width)
    gathers_hidden = dims.gathered is None
    normed_elements = tokens * m if dims.takes_own and (tensor > 1 or not gathers_hidden) else 0
    normed_elements += positions * m if gathers_hidden else 0
    narrow = (
        tokens * (m + kept_widths.of_tokens)
        + normed_elements
        + positions * (kept_widths.gathered + kept_widths.beside // tensor)
    )
    in_float32 = tokens * kept_widths.of_tokens_wide + positions * kept_widths.wide // tensor
    if not on_cpu:
        narrow += positions * kept_widths.fused // tensor
    elif width == wide:
        narrow += positions * kept_widths.fused_on_cpu // tensor
    else:
        in_float32 += positions * kept_widths.fused_on_cpu // tensor
        narrow += positions * kept_widths.narrowed // tensor
    if tensor == 1:
        narrow += positions * kept_widths.normed_together
    else:
        in_float32 += 2 * positions * kept_widths.normed_together // tensor
    return width * narrow + wide * in_float32


def mask_bytes(attentions: Iterable[AttentionDims], positions: int, sequence_tokens: int, width: int) -> int:
    """Attention masks of packed documents, boolean and additive, shared by layers of equal window. CPUs only: GPUs
    use block masks."""
    windows = {dims.window for dims in attentions if dims.kept is not None and not dims.linear}
    return len(windows) * positions * sequence_tokens * (1 + max(4, width))


def worked_bytes(dims: AttentionDims, positions: int, sequence_tokens: int, tensor: int, profile: Profile) -> int:
    """Temporary bytes of our backward pass: the current chunks of linear attention."""
    if profile.name != "ours" or dims.kept is None or not dims.kept.worked:
        return 0
    at_once = min(dims.kept.worked_positions, sequence_tokens) * (positions // sequence_tokens)
    return 4 * at_once * dims.kept.worked // tensor
