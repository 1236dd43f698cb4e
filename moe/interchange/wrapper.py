"""Multimodal models: a language model's config and tensors next to those of other parts. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TIES = "tie_word_embeddings"
_FROM_WRAPPER = ("quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that apply to the language model unless its own config has them."""
_REASON = "this part is not trained; exports copy its tensors, and records with pictures are refused"


@dataclass(frozen=True)
class Wrapper:
    """Type of multimodal model: where its language model's config and tensors are, and what else it has."""

    model_type: str
    text_type: str
    """Default of the language model's `model_type`."""
    architecture: str
    """Class in transformers whose modules adapters are named after."""
    hub_prefixes: Mapping[str, str]
    """Prefix of the language model's tensors on the hub, by the prefix that they have in a language model alone."""
    memory_prefixes: Mapping[str, str]
    """Likewise for parameters of the class in transformers."""
    text_key: str = "text_config"
    """Key of the language model's config."""
    ties_embeddings: bool = False
    """Default of `tie_word_embeddings`, which applies instead of the language model's own."""
    parts: tuple[str, ...] = ("vision_config",)
    """Keys of the configs of other parts."""
    unused_keys: frozenset[str] = frozenset()
    """Keys without effect on the language model."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that must have these values."""
    fused_on_hub: bool = False
    """Whether folders on the hub have all experts in one tensor, unlike those of the language model alone."""

    @property
    def keys(self) -> set[str]:
        """Known keys of the config, besides those of every model."""
        return {self.text_key, TIES, *self.parts, *self.unused_keys, *self.only}

    @property
    def reasons(self) -> dict[str, str]:
        """Ignored keys that users are told about, each with the reason."""
        return dict.fromkeys(self.parts, _REASON)

    def has_language_tensor(self, name: str) -> bool:
        """Whether a tensor belongs to the language model."""
        return name.startswith((*self.hub_prefixes.values(), *self.memory_prefixes.values()))

    def text_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Config of the language model, with the keys that the wrapper's config sets."""
        outer_values = {key: config[key] for key in _FROM_WRAPPER if self._is_outer(config, key)}
        return {**self._own(config), **outer_values, TIES: config.get(TIES, self.ties_embeddings)}

    def path(self, config: Mapping[str, Any], key: str) -> str:
        """Path in a config of a key that `text_config` has."""
        is_outer = key == TIES or (key in _FROM_WRAPPER and self._is_outer(config, key))
        return key if is_outer else f"{self.text_key}.{key}"

    def with_text_config(self, config: Mapping[str, Any], text_config: Mapping[str, Any]) -> dict[str, Any]:
        """Config with another `text_config`; keys with the same values stay where they are."""
        own, previous = self._own(config), self.text_config(config)
        unchanged_keys = {key for key, value in text_config.items() if key in previous and previous[key] == value}
        new_text_config = {
            key: own[key] if key in unchanged_keys and key in own else value
            for key, value in text_config.items()
            if key in own or key not in unchanged_keys
        }
        result = {**config, self.text_key: new_text_config}
        return result if TIES in unchanged_keys else {**result, TIES: text_config[TIES]}

    def _is_outer(self, config: Mapping[str, Any], key: str) -> bool:
        return config.get(key) is not None and self._own(config).get(key) is None

    def _own(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return dict(config[self.text_key])


def replace_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Name with another prefix, by the prefix that it has."""
    for prefix, new_prefix in prefixes.items():
        if name.startswith(prefix):
            return new_prefix + name.removeprefix(prefix)
    return name
