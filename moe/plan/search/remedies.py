"""Changes to a job that would make it fit on its workers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moe.spec import AdapterSpec, JobSpec, LanguageModelSpec

_RANK = 16
_BASES = ("bfloat16", "nf4")


@dataclass(frozen=True)
class Remedy:
    """A changed job, and the change as an instruction to the user."""

    spec: JobSpec
    change: str


def unwritten_float32(spec: JobSpec) -> tuple[str, ...]:
    """Keys that the job leaves unset and that default to float32."""
    keys = []
    if spec.train.dtype == "float32" and "dtype" not in spec.train.model_fields_set:
        keys.append("train.dtype")
    adapter = _adapter(spec)
    if adapter is not None and adapter.base == "float32" and "base" not in adapter.model_fields_set:
        keys.append("adapter.base")
    return tuple(keys)


def bfloat16_remedy(spec: JobSpec) -> Remedy | None:
    """The job with bfloat16 for each unset float32 key; None without such keys."""
    if not (keys := unwritten_float32(spec)):
        return None
    new_spec = _in_bfloat16(spec) if "train.dtype" in keys else spec
    if "adapter.base" in keys:
        new_spec = _with_adapter(new_spec, _adapter(spec), "bfloat16")
    return Remedy(new_spec, f"write {' and '.join(f'{key}: bfloat16' for key in keys)}")


def adapter_remedy(spec: JobSpec, holds: Callable[[JobSpec], bool], *, has_bfloat16: bool) -> Remedy | None:
    """The job with the simplest adapter, or narrower base of its adapter, for which `holds`; None if there is none.
    `has_bfloat16`: whether devices compute in it."""
    return next((remedy for remedy in _adapter_remedies(spec, has_bfloat16=has_bfloat16) if holds(remedy.spec)), None)


def _adapter_remedies(spec: JobSpec, *, has_bfloat16: bool) -> Iterator[Remedy]:
    if not isinstance(spec.model, LanguageModelSpec):
        return
    adapter, keys = _adapter(spec), unwritten_float32(spec)
    dtypes = [(spec, "")]
    if "train.dtype" in keys and has_bfloat16:
        dtypes.append((_in_bfloat16(spec), ", with train.dtype: bfloat16"))
    for base in _BASES:
        if adapter is not None and (adapter.base == base or adapter.base in ("int8", "nf4")):
            continue
        for new_spec, dtype_change in dtypes:
            if adapter is None:
                change = (
                    f"train adapters instead of all weights, adapter: {{rank: {_RANK}, base: {base}}}{dtype_change}"
                )
            else:
                change = f"write adapter.base: {base}{dtype_change}"
            yield Remedy(_with_adapter(new_spec, adapter, base), change)


def _adapter(spec: JobSpec) -> AdapterSpec | None:
    return spec.model.adapter if isinstance(spec.model, LanguageModelSpec) else None


def _in_bfloat16(spec: JobSpec) -> JobSpec:
    return spec.model_copy(update={"train": spec.train.model_copy(update={"dtype": "bfloat16"})})


def _with_adapter(spec: JobSpec, adapter: AdapterSpec | None, base: str) -> JobSpec:
    template = AdapterSpec(rank=_RANK) if adapter is None else adapter
    new_adapter = template.model_copy(update={"base": base})
    return spec.model_copy(update={"model": spec.model.model_copy(update={"adapter": new_adapter})})
