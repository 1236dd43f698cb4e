"""Parts of the families' config tables that say which attention each layer has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moe.interchange.family import Field, Fields
from moe.interchange.fields import OneKey
from moe.interchange.reading import Reading, json_equal
from moe.spec import LanguageModelSpec

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


@dataclass(frozen=True)
class Windows(Field):
    """Layers with a sliding window of `sliding_window` tokens."""

    selection: Literal["all", "types"]
    """`all`: all layers, if there is a window. `types`: layers with `sliding_attention` in `layer_types`."""
    default: Literal["even", "below", "from", "pattern", "after_first", "five_of_six", "after_second", "none", ""] = ""
    """Without `layer_types`: even layers, even layers below `max_window_layers`, layers from `max_window_layers` on,
    all but every `sliding_window_pattern`-th, all but the first and every sixth, all but the last and every sixth, all
    from the third on but every fourth and the last, or none."""
    pattern_key: str = "sliding_window_pattern"
    previous_key: str | None = None
    """Key with the number of previous tokens in the window, which takes precedence (MiMo-V2)."""
    unused_window: int | None = None
    """`sliding_window` of a model without windows, if it may not be null."""
    has_switch: bool = False
    """Whether `use_sliding_window` must also be true."""

    @property
    def keys(self) -> tuple[str, ...]:
        keys = ["sliding_window"]
        keys += ["use_sliding_window"] if self.has_switch else []
        keys += ["max_window_layers"] if self.default in ("below", "from") else []
        keys += [self.pattern_key] if self.default == "pattern" else []
        keys += [] if self.previous_key is None else [self.previous_key]
        return (*keys, *(["layer_types"] if self.selection == "types" else []))

    def read(self, config: Reading) -> Fields:
        is_on = config.get("use_sliding_window", bool) if self.has_switch else True
        window = config.get("sliding_window", int, null=None) if is_on else None
        if self.previous_key is not None and config.has(self.previous_key):
            window = (config.get(self.previous_key, int) or 0) + 1
        if self.selection == "all":
            return {"attention.window": window, "attention.windowed_layers": "even" if window is None else "all"}
        layers = self._layers(config, is_on and window is not None)
        if layers and window is None:
            rule = f"has {SLIDING}, but no sliding_window is in use"
            config.refuse("layer_types", None, rule, "correct config.json", code="requires")
        number = config.get("num_hidden_layers", int) or 0
        short = {tuple(range(number)): "all", tuple(range(0, number, 2)): "even", (): "even"}
        layers_with_window = short.get(tuple(layers), layers)
        return {"attention.window": window if layers else None, "attention.windowed_layers": layers_with_window}

    def _layers(self, config: Reading, is_on: bool) -> list[int]:
        number = config.get("num_hidden_layers", int) or 0
        if config.has("layer_types"):
            return _of_type(config, number, SLIDING)
        if self.default == "even":
            return list(range(0, number, 2))
        if self.default == "pattern":
            period = config.get(self.pattern_key, int) or 1
            return [layer for layer in range(number) if (layer + 1) % period]
        if self.default == "none":
            return []
        if self.default == "after_second":
            return [layer for layer in range(2, number - 1) if layer % 4 != 1]
        if self.default == "after_first":
            return [layer for layer in range(1, number) if (layer + 1) % 6]
        if self.default == "five_of_six":
            return [layer for layer in range(number - 1) if (layer + 1) % 6]
        if not is_on:
            return []
        first = config.get("max_window_layers", int)
        if first is None:
            return []
        layers = range(0, min(number, first), 2) if self.default == "below" else range(max(0, first), number)
        return list(layers)

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        windows = [spec.window_of(layer) for layer in range(spec.num_layers)]
        window = next((layer_window for layer_window in windows if layer_window is not None), None)
        keys: dict[str, Any] = {"sliding_window": self.unused_window if window is None else window}
        if self.previous_key is not None and window is not None:
            keys[self.previous_key] = window - 1
        if self.has_switch:
            keys["use_sliding_window"] = window is not None
        if self.selection == "types":
            keys["layer_types"] = [FULL if layer_window is None else SLIDING for layer_window in windows]
        return keys

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        """Switch off a window that no layer uses: transformers 4 ignores `layer_types` of Qwen2-MoE and would apply the
        window to every layer."""
        is_used = any(spec.window_of(layer) is not None for layer in range(spec.num_layers))
        if is_used or not config.get("use_sliding_window"):
            return {}
        return {"use_sliding_window": False, "sliding_window": None}


@dataclass(frozen=True)
class LinearLayers(Field):
    """Every n-th layer has full attention, all others linear (Qwen3-Next)."""

    keys = ("layer_types", "full_attention_interval")

    def read(self, config: Reading) -> Fields:
        number = config.get("num_hidden_layers", int) or 0
        if not config.has("layer_types"):
            interval = config.get("full_attention_interval", int)
            if interval == 1:
                config.refuse("full_attention_interval", interval, "leaves no layer with linear attention")
            return {"full_attention_every": interval}
        full = set(range(number)) - set(_of_type(config, number, LINEAR))
        interval = min(full) + 1 if full else number + 1
        if full != set(range(interval - 1, number, interval)):
            config.refuse("layer_types", None, "must have full attention in every n-th layer and only there")
        elif interval == 1:
            config.refuse("layer_types", None, "leave no layer with linear attention")
        return {"full_attention_every": interval}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        full = [spec.has_full_attention(layer) for layer in range(spec.num_layers)]
        return {"layer_types": [FULL if is_full else LINEAR for is_full in full]}


@dataclass(frozen=True)
class AttentionLayers(Field):
    """`layer_types`, with full attention in some layers and linear attention, under one of several names, in the
    others."""

    linear_types: tuple[str, ...]
    """Names of layers with linear attention; the first is written."""
    full_types: tuple[str, ...] = (FULL,)
    """Names of layers with full attention; the first is written."""
    default: str | None = None
    """Type of all layers without `layer_types`, which are required if it is None."""

    keys = ("layer_types",)

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        return self.write(spec)  # transformers 4 knows only the first names

    def read(self, config: Reading) -> Fields:
        number = config.get("num_hidden_layers", int) or 0
        if config.raw("layer_types") is None:
            if self.default is None:
                config.refuse("layer_types", None, "is required", "add it to config.json", code="missing")
                return {}
            return {"attention_layers": list(range(number)) if self.default in self.full_types else []}
        types = config.entries("layer_types", number, {*self.full_types, *self.linear_types})
        if types is None:
            return {}
        return {"attention_layers": [layer for layer, name in enumerate(types) if name in self.full_types]}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        layers = range(spec.num_layers)
        full, linear = self.full_types[0], self.linear_types[0]
        return {"layer_types": [full if spec.has_full_attention(layer) else linear for layer in layers]}


@dataclass(frozen=True)
class EveryLayer(OneKey):
    """A list with one entry per layer, all of which must be this one."""

    entry: Any

    def read(self, config: Reading) -> Fields:
        number, entries = config.get("num_hidden_layers", int) or 0, config.raw(self.config_key)
        if entries is None:
            return {}
        if not isinstance(entries, list) or any(not json_equal(entry, self.entry) for entry in entries):
            config.refuse(self.config_key, None, f"must be {self.entry!r} for every layer; nothing else is supported")
        elif len(entries) != number:
            rule = f"must have num_hidden_layers (={number}) entries, not {len(entries)}"
            config.refuse(self.config_key, None, rule, "correct config.json", code="invalid_value")
        return {}


def _of_type(config: Reading, number: int, kind: str) -> list[int]:
    types = config.entries("layer_types", number, {FULL, kind}) or []
    return [layer for layer, layer_type in enumerate(types) if layer_type == kind]
