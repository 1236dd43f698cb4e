"""Sampling settings of a model's `generation_config.json`, with the meaning that they have in transformers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe.data.special_tokens import json_object
from moe.interchange.ignored import BOOKKEEPING, GENERATION
from moe.interchange.reading import json_equal
from moe.spec.errors import Problem, SpecError
from moe.spec.generation import GenerationSpec

FILE = "generation_config.json"
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_FIELDS = {"do_sample": "temperature"}
"""Fields of a request that override keys of another name."""
_DEFAULT_TEMPERATURE, _DEFAULT_TOP_K = 1.0, 50
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"), (1,)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "stop_strings"), ([],)),
    **dict.fromkeys(("token_healing", "remove_invalid_values"), (False,)),
    **dict.fromkeys((
        "max_new_tokens", "max_length", "max_time", "top_h", "forced_bos_token_id", "forced_eos_token_id",
        "exponential_decay_length_penalty", "sequence_bias", "watermarking_config", "constraints", "force_words_ids",
        "dola_layers",
    ), ()),
}  # fmt: skip
"""Keys that change the text in transformers and not here, each with the values that change nothing, beside null."""
_REASONS = dict.fromkeys(("max_new_tokens", "max_length"), "max_tokens limits the text")


@dataclass(frozen=True)
class GenerationConfig:
    """Settings that apply where a request has none."""

    settings: Mapping[str, float] = field(default_factory=dict)
    """By field of `GenerationSpec`."""
    notes: tuple[str, ...] = ()
    """Settings that are not supported, in words."""
    problems: tuple[Problem, ...] = ()
    """Invalid settings, by their key."""

    @classmethod
    def of_files(cls, files: Mapping[str, bytes]) -> "GenerationConfig":
        """Settings of the file among a model's files; none if there is no such file."""
        config = json_object(files, FILE)
        if not config and files.get(FILE, b"{}").strip() != b"{}":
            return cls(notes=(f"{FILE} is not applied: it must be a JSON object",))
        settings = {name: config[name] for name in _SETTINGS if config.get(name) is not None}
        problems, do_sample = list[Problem](), config.get("do_sample")
        for name, value in settings.items():
            try:
                GenerationSpec(**{name: value})
            except SpecError as error:
                problems += [replace(problem, remedy=f"set {name} in the request") for problem in error.problems]
        if do_sample is not None and not isinstance(do_sample, bool):
            problems.append(Problem("wrong_type", "do_sample", do_sample, "must be true or false",
                                    "set temperature in the request"))  # fmt: skip
        if do_sample is True:
            settings = {"temperature": _DEFAULT_TEMPERATURE, "top_k": _DEFAULT_TOP_K, **settings}
        else:
            settings.pop("temperature", None)  # greedy, unless the request has a temperature
        return cls(settings, tuple(_notes(config)), tuple(problems))

    def complete(self, spec: GenerationSpec) -> GenerationSpec:
        """Spec with these settings where it has none. Raises SpecError for an invalid setting that would apply."""
        temperature = self.settings.get("temperature", 0) if spec.temperature is None else spec.temperature
        applied_keys = {"repetition_penalty"}
        if spec.num_beams == 1:
            applied_keys |= {"do_sample", *(_SETTINGS if temperature else ())}
        invalid = {problem.path for problem in self.problems}
        if problems := [
            replace(problem, path=f"{FILE}:{problem.path}")
            for problem in self.problems
            if problem.path in applied_keys and getattr(spec, _FIELDS.get(problem.path, problem.path)) is None
        ]:
            raise SpecError(problems)
        return spec.resolve({name: value for name, value in self.settings.items() if name not in invalid})


def _notes(config: Mapping[str, Any]) -> list[str]:
    known_keys = BOOKKEEPING | GENERATION
    return [
        f"{FILE}: {key} (={json.dumps(value)[:100]}) is not applied: {_REASONS.get(key, 'it is not supported')}"
        for key, value in sorted(config.items())
        if value is not None
        and (key in _UNSUPPORTED or key not in known_keys)
        and not any(json_equal(value, neutral) for neutral in _UNSUPPORTED.get(key, ()))
    ]
