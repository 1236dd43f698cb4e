"""A folder with an adapter in PEFT's format: checks it against a model, and fills in a job's `adapter: {from: FOLDER}`.
Reads only config and headers. No torch."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moe.interchange.adapter_config import AGAIN, CONFIG, KIND, WEIGHTS, misfits
from moe.interchange.adapter_parts import (
    FIRST,
    PREFIX,
    SECOND,
    AdapterPlace,
    expert_modules,
    halves,
    memory_rows,
    places_of,
    require_named_modules,
    saved_modules,
    token_row_pieces,
)
from moe.interchange.adapter_patterns import ScalePatterns, names_target
from moe.interchange.encoded import PLAIN, CatalogTensor
from moe.interchange.family import Family
from moe.interchange.fitting import head_of
from moe.interchange.headers import entries
from moe.interchange.hub_folder import HubFolder
from moe.interchange.pieces import ParameterPiece
from moe.spec import AdapterSpec, LanguageModelSpec, Problem, ProblemCode, SpecError, spec_error
from moe.spec.adapter_names import EMBEDDING, TABLES, is_target
from moe.spec.patterns import layer_pattern

_EXPERT_MODULE = re.compile(r"\.experts\.\d+\.\w+\.lora_")
PICKLE = "adapter_model.bin"
_FIELDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "rank": ("r", (int,)), "alpha": ("lora_alpha", (int, float)), "rank_stabilized": ("use_rslora", (bool,)),
    "dora": ("use_dora", (bool,)),
}  # fmt: skip
"""Config key and types of each field of a job's adapter."""


class AdapterFolder:
    """Config and tensors of the folder. `place` is the folder's path in errors. Raises SpecError."""

    def __init__(self, url: str, roots: Sequence[str] | None, place: str = "adapter.from") -> None:
        folder = HubFolder(url, roots, place)
        self.url, self._place = folder.url, place
        self._config, self._digest = folder.config(CONFIG)
        self._config_path, self._weights_path = folder.path(CONFIG), folder.path(WEIGHTS)
        if not folder.has(WEIGHTS):
            rule, remedy = f"has no {WEIGHTS}", "name a folder with an adapter saved by PEFT"
            if folder.has(PICKLE):
                rule += f", but a pickle ({PICKLE}), which can run code and is never loaded"
                remedy = "if you trust it, save it as safetensors"
            raise spec_error("not_found", place, self.url, rule, remedy)
        self.location = folder.find(WEIGHTS)
        self.tensors = {
            entry.name: CatalogTensor(entry.name, entry.shape, entry)
            for entry in entries(WEIGHTS, self.location, place)
        }
        self._has_expert_modules = any(_EXPERT_MODULE.search(name) for name in self.tensors)
        """Whether it was written with transformers 4."""

    def fill_in(
        self, adapter: Mapping[str, Any], place: str, model: tuple[LanguageModelSpec, Family] | None = None
    ) -> dict[str, Any]:
        """Return a job's adapter as plain data with the folder's fields filled in; targets only if the base `model` is
        known. Raises SpecError if the adapter belongs to another model, was filled in from another config, or
        contradicts the folder."""
        if adapter.get("from_config") not in (None, self._digest):
            raise spec_error("changed",
                self._place, self.url, f"has changed: the other fields came from a different {CONFIG}",
                f"write only {place}: {{from: FOLDER}}",
            )  # fmt: skip
        if (kind := self._config.get("peft_type")) != KIND:
            rule = f"must be {KIND!r}, the only supported kind"
            raise spec_error(
                "unsupported", f"{self._config_path}:peft_type", kind, rule, "name the folder of a LoRA adapter"
            )
        fields: dict[str, Any] = {name: self._value(*key_and_kinds) for name, key_and_kinds in _FIELDS.items()}
        problems = [
            _mismatch(f"{place}.{name}", adapter[name], value, self._config_path)
            for name, value in fields.items()
            if adapter.get(name) not in (None, value)
        ]
        if model is not None and not problems:
            require_named_modules(model[1])
            spec, family = model[0], self._naming_family(model[1])
            self._check_tied(spec, family)
            matrices, adapted_matrices = _matrices(spec), self._adapted_matrices(spec, family)
            fields["targets"] = _targets(adapted_matrices, matrices)
            fields["groups"] = self._groups(self._scales(adapted_matrices, spec, family))
            fields["modules_to_save"] = self._saved_modules(spec, family)
            fields["trainable_token_indices"] = self._token_ids(spec, family)
            for name in ("groups", "modules_to_save", "trainable_token_indices"):
                if adapter.get(name) not in (None, [], (), fields[name]):
                    problems.append(_mismatch(f"{place}.{name}", adapter[name], fields[name], self._config_path))
            if (targets := adapter.get("targets")) is not None:
                fields["targets"] = targets
                problems += _target_problems(f"{place}.targets", targets, adapted_matrices, matrices)
            if not adapted_matrices:
                problems += self._other_base_problems()
            elif not problems:
                problems += self._problems_of(fields, place, spec, family)
        if problems:
            raise SpecError(problems)
        return {"dropout": self._dropout(), **adapter, **fields, "from_config": self._digest}

    def problems(self, spec: LanguageModelSpec, family: Family) -> Iterator[Problem]:
        """Yield the differences between the folder and a model's adapter, with both values."""
        assert spec.adapter is not None
        family = self._naming_family(family)
        adapter_halves = halves(spec, family, has_expert_modules=self._has_expert_modules)
        try:
            scales = self._scales(places_of(adapter_halves), spec, family)
            in_config, token_ids = self._saved_modules(spec, family), self._token_ids(spec, family)
        except SpecError as error:
            yield from error.problems
            return
        yield from misfits(self._config, spec.adapter, scales, self._config_path)
        if set(in_config) != {*spec.adapter.modules_to_save}:
            rule = f"must mean {list(spec.adapter.modules_to_save)} here, but means {in_config}"
            yield Problem("mismatch", f"{self._config_path}:modules_to_save", self._config.get("modules_to_save"), rule,
                          AGAIN)  # fmt: skip
        rows = spec.adapter.trainable_token_indices
        if token_ids != (None if rows is None else rows.model_dump(mode="json")):
            rule = f"must mean {rows!r} here, but means {token_ids}"
            yield Problem("mismatch", f"{self._config_path}:trainable_token_indices",
                          self._config.get("trainable_token_indices"), rule, AGAIN)  # fmt: skip
        pieces = [piece for half in adapter_halves for piece in half.pieces]
        pieces += [piece for _, piece in token_row_pieces(spec, family).values()]
        pieces += _saved_pieces(spec, family).values()
        shapes = {name: piece.tensor_side.shape for piece in pieces for name in piece.names()}
        for name, shape in shapes.items():
            tensor_path = f"{self._weights_path}:{name}"
            if (tensor := self.tensors.get(name)) is None:
                yield Problem("missing", tensor_path, None, f"is missing, of shape {list(shape)}", AGAIN)
            elif tensor.shape != shape:
                yield Problem(
                    "shape_mismatch", tensor_path, list(tensor.shape), f"must have the shape {list(shape)}", AGAIN
                )
            elif tensor.entry.dtype not in PLAIN:
                yield Problem("dtype_mismatch", tensor_path, tensor.entry.dtype, f"must be one of {', '.join(PLAIN)}",
                              "convert it to float32")  # fmt: skip
        copies = {name for names in self.base_copies(spec, family).values() for name in names}
        yield from (self._unknown_tensor(name) for name in self.tensors if name not in {*shapes, *copies})

    def _problems_of(
        self, fields: Mapping[str, Any], place: str, spec: LanguageModelSpec, family: Family
    ) -> list[Problem]:
        """Problems of the adapter with these fields."""
        try:
            return list(self.problems(spec.model_copy(update={"adapter": AdapterSpec(**fields)}), family))
        except SpecError as error:
            return [replace(problem, path=f"{place}.{problem.path}") for problem in error.problems]

    def not_finite(self, name: str) -> Problem:
        """Problem for a tensor with infinite or NaN values."""
        rule = "contains infinite or NaN values"
        return Problem(
            "not_finite", f"{self._weights_path}:{name}", None, rule, "download the file again, or retrain the adapter"
        )

    def parts(self, spec: LanguageModelSpec, family: Family) -> dict[str, tuple[ParameterPiece, ...]]:
        """Pieces of a model's trained parameters, by our names. Raises SpecError for an adapter of another model, base
        or kind."""
        if problems := list(self.problems(spec, family)):
            raise SpecError(problems)
        family = self._naming_family(family)
        adapter_halves = halves(spec, family, has_expert_modules=self._has_expert_modules)
        return {
            **{half.parameter_name: half.pieces for half in adapter_halves},
            **{name: (piece,) for name, piece in _saved_pieces(spec, family).items()},
            **{name: (piece,) for name, (_, piece) in token_row_pieces(spec, family).items()},
        }

    def base_copies(self, spec: LanguageModelSpec, family: Family) -> dict[str, list[str]]:
        """Copies of the base's tables in the folder, by our names: PEFT saves them with adapters of tables, and loads
        them into the base."""
        family, copies = self._naming_family(family), {}
        for name, (place, piece) in saved_modules(spec, family).items():
            if spec.adapter is None or not spec.adapter.saves(name):
                endings = ("base_layer.weight", "token_adapter.base_layer.weight", "weight")
                names = [f"{PREFIX}{place.module}.{ending}" for ending in endings]
                shape = piece.tensor_side.shape
                copies[name] = [key for key in names if key in self.tensors and self.tensors[key].shape == shape]
        return copies

    def other_table(self, name: str) -> Problem:
        """Problem for a copy of a table that differs from the base's."""
        rule = "differs from the base's table, which PEFT would replace by it"
        return Problem("mismatch", f"{self._weights_path}:{name}", None, rule,
                       "use the base that the adapter was trained on")  # fmt: skip

    def _naming_family(self, family: Family) -> Family:
        """Family that names the folder's tensors: a wrapper's, or that of its language model, which transformers'
        AutoModelForCausalLM loads alone."""
        if family.wrapper is None or family.text_family is None:
            return family
        memory_prefixes = family.wrapper.memory_prefixes.items()
        prefixes = tuple(f"{PREFIX}{prefix}" for alone, prefix in memory_prefixes if prefix != alone)
        return family if any(name.startswith(prefixes) for name in self.tensors) else family.text_family

    def _value(self, key: str, kinds: tuple[type, ...]) -> Any:
        value = self._config.get(key)
        value = False if value is None and bool in kinds else value
        if type(value) not in kinds:
            rule = "must be true or false" if bool in kinds else "must be a number"
            raise spec_error(
                "wrong_type", f"{self._config_path}:{key}", value, rule, "download the file again, or correct it"
            )
        return value

    def _dropout(self) -> Any:
        """Dropout in the config. It affects only training, so a job may change it."""
        value = self._config.get("lora_dropout", 0.0)
        if type(value) not in (int, float) or not 0 <= value < 1:
            code: ProblemCode = "out_of_range" if type(value) in (int, float) else "wrong_type"
            rule = "must be a number from 0 to below 1"
            raise spec_error(code, f"{self._config_path}:lora_dropout", value, rule, "correct it")
        return value

    def _check_tied(self, spec: LanguageModelSpec, family: Family) -> None:
        """Raise SpecError for an adapter of tied output weights."""
        module = head_of(family).rpartition(".")[0]
        names = [name for name in self.tensors if name.startswith(f"{PREFIX}{module}.lora_")]
        if spec.tie_embeddings and names:
            rule = "adapts output weights that are tied to the embedding, which PEFT adapts or steps separately"
            raise spec_error("unsupported", f"{self._weights_path}:{names[0]}", None, rule,
                             "use an adapter without it")  # fmt: skip

    def _token_ids(self, spec: LanguageModelSpec, family: Family) -> dict[str, list[int]] | None:
        """Tokens whose rows are trained, as `TokenRowsSpec` has them; None without any. Raises SpecError."""
        path, value = f"{self._config_path}:trainable_token_indices", self._config.get("trainable_token_indices")
        if value is None:
            return None
        by_module = value if isinstance(value, dict) else {"": value}
        if not all(isinstance(ids, list) and all(type(id) is int for id in ids) for ids in by_module.values()):
            rule = "must be a list of token ids, or an object of module names and such lists"
            raise spec_error("wrong_type", path, value, rule, "correct it")
        modules = {place.module: name.partition(".")[0] for name, (place, _) in saved_modules(spec, family).items()}
        if spec.tie_embeddings:
            modules[head_of(family).rpartition(".")[0]] = "embedding"
        rows: dict[str, list[int]] = {"embedding": [], "output": []}
        for key, ids in by_module.items():
            tables = {table for module, table in modules.items() if module.endswith(key)} if key else {"embedding"}
            if len(tables) != 1 or rows[table := tables.pop()] not in ([], ids):
                rule = f"has {key}, but rows of {' and '.join(modules)} are trained, the same of tied tables"
                raise spec_error("unsupported", path, value, rule, "use an adapter without it")
            rows[table] = ids
        return rows

    def _saved_modules(self, spec: LanguageModelSpec, family: Family) -> list[str]:
        """Our names of modules that are trained whole. Raises SpecError."""
        path, names = f"{self._config_path}:modules_to_save", self._config.get("modules_to_save") or []
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise spec_error("wrong_type", path, names, "must be a list of module names", "correct it")
        modules = {place.module: name for name, (place, _) in saved_modules(spec, family).items()}
        trained_modules = set()
        for name in names:
            matching = {module for module in modules if module.endswith(name)}  # as PEFT matches
            if len(matching) != 1:
                rule = f"has {name}, but only {' and '.join(modules)} can be trained whole beside an adapter"
                raise spec_error("unsupported", path, names, rule, "use an adapter without it, or train all weights")
            trained_modules |= matching
        return sorted(modules[module].partition(".")[0] for module in trained_modules)

    def _scales(
        self, adapted_matrices: Mapping[str, AdapterPlace], spec: LanguageModelSpec, family: Family
    ) -> dict[str, tuple[int, float]]:
        """(rank, alpha) of each of our matrices in the config. Raises SpecError."""
        if not all(type(self._config.get(key)) in (int, float) for key in ("r", "lora_alpha")):
            return {}
        patterns = ScalePatterns.of_config(self._config, self._config_path)
        scales = {}
        for name, place in adapted_matrices.items():
            scales[name] = patterns.rank_of(place), patterns.alpha_of(place)
            if self._has_expert_modules and ".experts." in name:
                modules = [module for module, _ in expert_modules(spec, family, name)]
                scales[name] = patterns.of_experts(modules, spec, self._config_path)
        return scales

    def _groups(self, values: Mapping[str, tuple[int, float]]) -> list[dict[str, Any]]:
        """Groups of a job's adapter whose matrices have these ranks and alphas."""
        default = self._config["r"], self._config["lora_alpha"]
        return [
            {"pattern": pattern, "rank": rank, "alpha": alpha}
            for rank, alpha in dict.fromkeys(values.values()) if (rank, alpha) != default
            for pattern in _exact_patterns({name for name in values if values[name] == (rank, alpha)}, values)
        ]  # fmt: skip

    def _adapted_matrices(self, spec: LanguageModelSpec, family: Family) -> dict[str, AdapterPlace]:
        """Places of the model's matrices for which the folder has an adapter, by our names."""
        places = {}
        for name in _matrices(spec):
            layer, rows = memory_rows(spec, family, name, in_hub=self._has_expert_modules)
            if not rows:
                continue
            if name == EMBEDDING:
                place = AdapterPlace.from_row(rows[0], layer, is_module=True)
                if f"{PREFIX}{place.module}.lora_embedding_A" in self.tensors:
                    places[name] = place
                continue
            if self._has_expert_modules:
                place = AdapterPlace.from_row(rows[0], layer, is_module=True)
                experts = range(spec.moe.num_experts if spec.moe is not None else 1)
                modules = {place.module.replace("{e}", str(expert)) for expert in experts}
                if any(f"{PREFIX}{module}.lora_A.weight" in self.tensors for module in modules):
                    places[name] = place
                continue
            place = AdapterPlace.from_row(rows[0], layer, is_module=False)
            has = f"{PREFIX}{place.module}.lora_A.weight" in self.tensors
            if (
                place.parameter in (*FIRST, SECOND)
                and f"{PREFIX}{place.module}.base_layer.lora_A.weight" not in self.tensors
            ):
                has = has and names_target(self._config, place)  # a single wrapper may belong to either
            if has:
                places[name] = place
        return places

    def _other_base_problems(self) -> Iterator[Problem]:
        if not self.tensors:
            yield Problem("empty", self._place, self.url, "has no adapter matrices", "name another folder")
        yield from map(self._unknown_tensor, self.tensors)

    def _unknown_tensor(self, name: str) -> Problem:
        rule = "is not part of this model's adapter"
        return Problem("unknown_key", f"{self._weights_path}:{name}", list(self.tensors[name].shape), rule, AGAIN)


def _saved_pieces(spec: LanguageModelSpec, family: Family) -> dict[str, ParameterPiece]:
    """Pieces of parameters trained whole."""
    adapter = spec.adapter
    if adapter is None or not adapter.modules_to_save:
        return {}
    return {name: piece for name, (_, piece) in saved_modules(spec, family).items() if adapter.saves(name)}


def _matrices(spec: LanguageModelSpec) -> list[str]:
    """Names of matrices that can have an adapter."""
    all_targets = AdapterSpec(rank=1, targets=("*", *TABLES))
    return [parameter.name for parameter in spec.parameters() if all_targets.chooses(parameter.name)]


def _targets(adapted_matrices: Collection[str], matrices: Sequence[str]) -> tuple[str, ...] | None:
    """Patterns that match exactly the adapted matrices; None if these are the default targets."""
    if set(adapted_matrices) == {name for name in matrices if AdapterSpec(rank=1).chooses(name)}:
        return None
    return _exact_patterns(adapted_matrices, matrices)


def _exact_patterns(chosen_matrices: Collection[str], matrices: Iterable[str]) -> tuple[str, ...]:
    """Patterns that match exactly these of the matrices. Each is as general as possible: one matrix in all layers, else
    a whole layer, else a layer's attention or feed-forward part."""
    chosen_names = [name for name in matrices if name in chosen_matrices]
    partial = {pattern for name in matrices if name not in chosen_matrices for pattern in _patterns_of(name)}
    patterns = (
        next((pattern for pattern in _patterns_of(name) if pattern not in partial), name) for name in chosen_names
    )
    return tuple(dict.fromkeys(patterns))


def _mismatch(path: str, value: Any, config_value: Any, config_path: str) -> Problem:
    return Problem("mismatch", path, value, f"must be {config_value!r}, as {config_path} says", "omit it")


def _patterns_of(name: str) -> tuple[str, ...]:
    """Patterns that match a matrix and others, in order of preference."""
    if name in TABLES:
        return (name,)
    layers, number, part, *_ = name.split(".")
    return layer_pattern(name), f"{layers}.{number}.*", f"{layers}.{number}.{part}.*"


def _target_problems(
    place: str, targets: Any, adapted_matrices: Mapping[str, AdapterPlace], matrices: Sequence[str]
) -> Iterator[Problem]:
    """Yield a problem if a job's targets differ from the folder's. Malformed targets are reported when the job is
    parsed."""
    if not isinstance(targets, list | tuple) or not all(isinstance(pattern, str) for pattern in targets):
        return
    chosen_matrices = {name for name in matrices if any(is_target(pattern, name) for pattern in targets)}
    differing = sorted(chosen_matrices ^ adapted_matrices.keys())
    if differing:
        difference = "also a target" if differing[0] in chosen_matrices else "not a target"
        rule = f"must match the folder's adapter, but {differing[0]} is {difference}"
        yield Problem("mismatch", place, list(targets), rule, "omit it")
