"""Record of the folder that a model started from, kept in checkpoints."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe.interchange.catalog import Catalog, catalog
from moe.interchange.config import family_of
from moe.interchange.family import Family
from moe.interchange.fitting import Fit, alternatives, expected_tensors, fit, head_of
from moe.interchange.hub_folder import CONFIG, MAX_CONFIG_BYTES, HubFolder
from moe.interchange.mixture import config_of
from moe.spec import LanguageModelSpec, spec_error
from moe.storage.folder import MAX_READ_BYTES

RECORD = "origin.json"
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "tiktoken.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    "LICENSE", "LICENSE.txt", "LICENSE.md", "LICENSE-MODEL", "NOTICE", "NOTICE.txt",
    "USE_POLICY.md",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"
_VERSION = 1


@dataclass(frozen=True)
class Origin:
    """Facts that an export needs about the folder that a model started from."""

    url: str
    config: Mapping[str, Any]
    """Config of the folder, or of the mixture that its dense model was upcycled to."""
    dtype: str
    """Most common dtype of tensors."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """dtypes of the other tensors, by their names in the hub's layout."""
    untrained_names: tuple[str, ...] = ()
    """Untrained tensors, which an export copies from the folder."""
    keeps_tied: bool = False
    """Whether the folder stores output weights although they equal the embedding."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Content of small files that are copied, by path."""
    digest: str | None = None
    """Digest of the folder's weights (`digest.digest_of`), if checkpoints omit them."""

    @classmethod
    def of_folder(cls, url: str, spec: LanguageModelSpec, roots: Sequence[str] | None = None) -> "Origin":
        """Origin of a folder's model. Reads headers and small files. Raises SpecError as `load_weights` does."""
        folder_catalog = catalog(HubFolder(url, roots))
        return cls.of_catalog(folder_catalog, spec)

    @classmethod
    def of_catalog(cls, folder_catalog: Catalog, spec: LanguageModelSpec) -> "Origin":
        """Origin of the model in a catalog."""
        fit_result = fit(spec, folder_catalog)
        config = dict(folder_catalog.config) if spec.upcycle is None else config_of(spec, folder_catalog.config)
        dtypes = dict(_dtypes(folder_catalog, spec, fit_result, family_of(config, CONFIG)))
        dtype_counts = Counter(dtype for name, dtype in dtypes.items() if name not in fit_result.untrained_names)
        main_dtype = dtype_counts.most_common(1)[0][0]
        other_dtypes = {name: dtype for name, dtype in dtypes.items() if dtype != main_dtype}
        return cls(
            folder_catalog.folder.url, config, main_dtype, other_dtypes, fit_result.untrained_names,
            fit_result.has_tied_head, dict(_small_files(folder_catalog.folder)),
        )  # fmt: skip

    @property
    def text_config(self) -> dict[str, Any]:
        """Config of the language model."""
        return family_of(self.config, CONFIG).text_config(self.config)

    def dtype_of(self, name: str) -> str:
        return self.dtypes.get(name, self.dtype)

    def to_files(self) -> dict[str, bytes]:
        """Files of the record by name, for `of_files`."""
        names = {path: path.replace("/", ".") for path in sorted(self.files)}
        record = {
            "version": _VERSION, "url": self.url, "config": self.config, "dtype": self.dtype, "dtypes": self.dtypes,
            "untrained": self.untrained_names, "keeps_tied": self.keeps_tied, "files": names, "digest": self.digest,
        }  # fmt: skip
        return {
            RECORD: json.dumps(record, indent=1).encode(),
            **{names[path]: content for path, content in self.files.items()},
        }

    @classmethod
    def of_files(cls, read: Callable[[str], bytes]) -> "Origin":
        """Origin from the record's files, read by `read`. Raises SpecError if another release wrote them."""
        record = json.loads(read(RECORD))
        if record.get("version") != _VERSION:
            raise spec_error("wrong_version", RECORD, record.get("version"), f"must have version {_VERSION}",
                             "export with the release that wrote it")  # fmt: skip
        return cls(
            record["url"], record["config"], record["dtype"], record["dtypes"], tuple(record["untrained"]),
            record["keeps_tied"], {path: read(name) for path, name in record["files"].items()}, record.get("digest"),
        )  # fmt: skip


def _dtypes(
    folder_catalog: Catalog, spec: LanguageModelSpec, fit_result: Fit, family: Family
) -> Iterator[tuple[str, str]]:
    """dtype of each tensor in a family's hub layout: that of its source in the folder, or bfloat16 if decoded. Buffers
    without a source are float32."""

    def dtype_of(name: str) -> str:
        stored_tensor = folder_catalog.tensors[name]
        return "BF16" if stored_tensor.is_decoded else stored_tensor.entry.dtype

    for tensor in expected_tensors(spec):
        source_names = [name for piece in fit_result.pieces.get(tensor.name, ())[:1] for name in piece.names()]
        for piece in alternatives(spec, family, tensor)[0]:
            for name in piece.names():
                if name in folder_catalog.tensors or source_names:
                    yield name, dtype_of(name if name in folder_catalog.tensors else source_names[0])
                elif tensor.is_buffer:
                    yield name, "F32"
    if fit_result.has_tied_head:
        yield head_of(family), dtype_of(head_of(family))
    for name in fit_result.untrained_names:
        yield name, dtype_of(name)


def _small_files(folder: HubFolder) -> Iterator[tuple[str, bytes]]:
    for name in CARRIED:
        if folder.has(name):
            yield (name, folder.read(name, MAX_CONFIG_BYTES if name.endswith("config.json") else MAX_READ_BYTES))
    for location in folder.glob(f"{TEMPLATES}/*.jinja"):
        path = f"{TEMPLATES}/{location.path.rpartition('/')[2]}"
        yield path, folder.read(path, MAX_CONFIG_BYTES)
