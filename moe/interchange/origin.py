"""Origin of a model that came from a folder, taken along beside its weights: a record among a checkpoint's files."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe.interchange.catalog import Catalog, catalog
from moe.interchange.families import BY_TYPE
from moe.interchange.family import Family
from moe.interchange.fitting import LM_HEAD, Fit, alternatives, fit, wanted
from moe.interchange.hub_folder import MAX_CONFIG_BYTES, HubFolder
from moe.interchange.mixture import config_of
from moe.spec import LanguageModelSpec, Problem, SpecError
from moe.storage.folder import MAX_READ_BYTES

RECORD = "origin.json"
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "tiktoken.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "LICENSE-MODEL", "NOTICE", "NOTICE.txt",
    "USE_POLICY.md",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"
_VERSION = 1


@dataclass(frozen=True)
class Origin:
    """A folder that a model began with, as far as an export needs it."""

    url: str
    config: Mapping[str, Any]
    """The folder's; that of the mixture that a dense folder's model became."""
    dtype: str
    """Of most tensors."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Of others, by their names in the hub's layout."""
    untrained: tuple[str, ...] = ()
    """Tensors that are carried through, and read from the folder again when it comes to that."""
    keeps_tied: bool = False
    """Whether the folder has the logits' weights, though they are the embedding."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Carried small files, by path."""
    digest: str | None = None
    """Of its weights (`digest.digest_of`), where checkpoints do without them."""

    @classmethod
    def of_folder(cls, url: str, spec: LanguageModelSpec, roots: Sequence[str] | None = None) -> "Origin":
        """Origin of a folder's model. Reads headers and small files. Raises SpecError, as `load_weights` does."""
        found = catalog(HubFolder(url, roots))
        return cls.of_catalog(found, spec)

    @classmethod
    def of_catalog(cls, found: Catalog, spec: LanguageModelSpec) -> "Origin":
        """Origin of the model of a folder that has been looked at."""
        fitted = fit(spec, found)
        config = dict(found.config) if spec.upcycle is None else config_of(spec, found.config)
        dtypes = dict(_dtypes(found, spec, fitted, BY_TYPE[str(config["model_type"])]))
        trained = Counter(dtype for name, dtype in dtypes.items() if name not in fitted.untrained)
        most = trained.most_common(1)[0][0]
        others = {name: dtype for name, dtype in dtypes.items() if dtype != most}
        return cls(
            found.folder.url, config, most, others, fitted.untrained, fitted.tied_twice,
            dict(_small_files(found.folder)),
        )  # fmt: skip

    def dtype_of(self, name: str) -> str:
        return self.dtypes.get(name, self.dtype)

    def to_files(self) -> dict[str, bytes]:
        """The record, by name: what `of_files` reads."""
        names = {path: path.replace("/", ".") for path in sorted(self.files)}
        told = {
            "version": _VERSION, "url": self.url, "config": self.config, "dtype": self.dtype, "dtypes": self.dtypes,
            "untrained": self.untrained, "keeps_tied": self.keeps_tied, "files": names, "digest": self.digest,
        }  # fmt: skip
        return {
            RECORD: json.dumps(told, indent=1).encode(),
            **{names[path]: content for path, content in self.files.items()},
        }

    @classmethod
    def of_files(cls, read: Callable[[str], bytes]) -> "Origin":
        """The record of which `read` gives the files. Raises SpecError for another release's."""
        told = json.loads(read(RECORD))
        if told.get("version") != _VERSION:
            raise SpecError(Problem("wrong_version", RECORD, told.get("version"), f"must be of version {_VERSION}",
                                    "export with the release that has written it"))  # fmt: skip
        return cls(
            told["url"], told["config"], told["dtype"], told["dtypes"], tuple(told["untrained"]),
            told["keeps_tied"], {path: read(name) for path, name in told["files"].items()}, told.get("digest"),
        )  # fmt: skip


def _dtypes(
    found: Catalog, spec: LanguageModelSpec, fitted: Fit, family: Family
) -> Iterator[tuple[str, str]]:
    """Each tensor of a family's hub layout with the dtype in the folder of what it is made of, in whatever layout;
    bfloat16 if decoded. Of what the folder has nothing of only buffers, which are wide."""

    def of(name: str) -> str:
        held = found.held[name]
        return "BF16" if held.is_decoded else held.entry.dtype

    for each in wanted(spec):
        there = [name for piece in fitted.pieces.get(each.name, ())[:1] for name in piece.names()]
        for piece in alternatives(spec, family, each)[0]:
            for name in piece.names():
                if name in found.held or there:
                    yield name, of(name if name in found.held else there[0])
                elif each.is_buffer:
                    yield name, "F32"
    if fitted.tied_twice:
        yield LM_HEAD, of(LM_HEAD)
    for name in fitted.untrained:
        yield name, of(name)


def _small_files(folder: HubFolder) -> Iterator[tuple[str, bytes]]:
    for name in CARRIED:
        if folder.has(name):
            yield (
                name,
                folder.read(name, MAX_CONFIG_BYTES if name.endswith("config.json") else MAX_READ_BYTES),
            )
    for location in folder.several(f"{TEMPLATES}/*.jinja"):
        path = f"{TEMPLATES}/{location.path.rpartition('/')[2]}"
        yield path, folder.read(path, MAX_CONFIG_BYTES)
