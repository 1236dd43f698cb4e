"""Bytes that an attention keeps of a micro-batch for its backward pass."""

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
    """Bytes on one of `tensor` ranks that share `positions` of `m` channels: the input of the layer's norm (a rank's
    share), the norm's output (whole if gathered tokens are kept), and the tensors that the heads keep. `width`: bytes
    of an element."""
    if profile.name == "ours" and dims.kept is not None:
        return _by_ours(dims, dims.kept, m, positions, tensor, width, on_cpu=on_cpu)
    return width * _elements(dims, m, positions, tensor, profile, selective=selective)


def _elements(
    dims: AttentionDims, m: int, positions: int, tensor: int, profile: Profile, *, selective: bool
) -> int:
    """Queries, keys, values and what heads gave, of the rank's heads. Selective recomputation makes what comes from
    latents again, where the profile says so."""
    split = (
        dims.values
        if selective and profile.recomputes_latents and dims.latent
        else dims.queries + dims.kept_keys_and_values + dims.rotated + dims.values
    )
    gathered_width = m if profile.keeps_gathered_tokens else m // tensor
    return positions * (m // tensor + gathered_width + split // tensor + dims.latent)


def _by_ours(
    dims: AttentionDims,
    kept_widths: KeptWidths,
    m: int,
    positions: int,
    tensor: int,
    width: int,
    *,
    on_cpu: bool,
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
    """Masks of packed documents on a CPU, which layers with the same window share for a pass: whether a position sees
    another, and what that adds to its score. On GPUs they are told in blocks."""
    windows = {dims.window for dims in attentions if dims.kept is not None and not dims.linear}
    return len(windows) * positions * sequence_tokens * (1 + max(4, width))


def worked_bytes(
    dims: AttentionDims, positions: int, sequence_tokens: int, tensor: int, profile: Profile
) -> int:
    """Held beside for a while by the backward pass of ours: of fused attention little, of states the chunks at work."""
    if profile.name != "ours" or dims.kept is None or not dims.kept.worked:
        return 0
    at_once = min(dims.kept.worked_positions, sequence_tokens) * (positions // sequence_tokens)
    return 4 * at_once * dims.kept.worked // tensor
