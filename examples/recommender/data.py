"""Modules that the source files of installed packages import, with the number of names from each.

A file is the user, a module the item: known imports of a file predict further ones. The packages are dependencies of
Shardyard, so every node has them in the installed versions.
"""

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution

import torch
from torch import Tensor

DISTRIBUTIONS = ("django", "networkx", "numpy", "pandas", "ray", "sqlalchemy", "sympy", "torch")
MIN_FILES = 5
"""Fewest files that import a module which is recommended."""
MIN_IMPORTS = 4
"""Fewest such modules that a file imports; one of them is held out."""
MAX_IMPORTS = 24
"""Most that are kept of a file."""

NUM_IMPORTED, NUM_COMMON, NUM_ANY = 256, 128, 640
"""Rows of a batch: modules that the file imports, those that some file does, and any."""

STATEMENT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#;]+)|import[ \t]+([^\n#;]+))", re.MULTILINE
)

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Imports:
    """Imports of files. U files, I modules, the first of which is padding; W imports at most per file."""

    files: tuple[str, ...]
    modules: tuple[str, ...]
    modules_UW: Tensor
    """Modules of each file, but the one held out; 0 after the last."""
    names_UW: Tensor
    """How many names it takes from each, as log2(1 + n)."""
    held_out_U: Tensor
    held_out_names_U: Tensor
    digest: str
    """Hash of all of it: the same on nodes that have the same packages."""


@cache
def imports() -> Imports:
    """The data set, read once a process within seconds."""
    names_by_file = dict(_read())
    counts = Counter(module for names_by_module in names_by_file.values() for module in names_by_module)
    modules = ("", *sorted(module for module, count in counts.items() if count >= MIN_FILES))
    number = {module: index for index, module in enumerate(modules)}
    rows = {}
    for file, names_by_module in names_by_file.items():
        pairs = [(number[module], names) for module, names in names_by_module.items() if module in number]
        if len(pairs) >= MIN_IMPORTS:
            rows[file] = _in_an_order(file, pairs)[: MAX_IMPORTS + 1]
    files = tuple(sorted(rows))
    pairs_UWN = torch.zeros(len(files), MAX_IMPORTS + 1, 2, dtype=torch.int64)
    for row, file in enumerate(files):
        pairs_UWN[row, : len(rows[file])] = torch.tensor(rows[file])
    modules_UW, names_UW = pairs_UWN[..., 0], torch.log2(1.0 + pairs_UWN[..., 1])
    digest = hashlib.sha256(repr((modules, files)).encode() + pairs_UWN.numpy().tobytes()).hexdigest()[:16]
    return Imports(files, modules, modules_UW[:, 1:], names_UW[:, 1:], modules_UW[:, 0], names_UW[:, 0], digest)


def batch(seed: int, step: int) -> Batch:
    """The batch of a step, the same in every process: files, their other imports, a module for each, whether it is
    imported, and the number of names imported from it."""
    dataset = imports()
    generator = torch.Generator().manual_seed((1_000_003 * seed + step) % 2**63)
    num_files, num_modules = len(dataset.files), len(dataset.modules)

    def draw_files(size: int) -> tuple[Tensor, Tensor]:
        """Random files, each with a module that it imports."""
        file_B = torch.randint(num_files, (size,), generator=generator)
        count_B = (dataset.modules_UW[file_B] > 0).sum(1)
        at_B = (torch.rand(size, generator=generator) * count_B).long()
        return file_B, dataset.modules_UW[file_B, at_B]

    file_B, imported_B = draw_files(NUM_IMPORTED + NUM_COMMON + NUM_ANY)
    common_B = draw_files(NUM_COMMON)[1]
    any_B = torch.randint(1, num_modules, (NUM_ANY,), generator=generator)
    module_B = torch.cat([imported_B[:NUM_IMPORTED], common_B, any_B])
    is_it_BW = dataset.modules_UW[file_B] == module_B[:, None]
    names_B = (dataset.names_UW[file_B] * is_it_BW).sum(1)
    # The input leaves out the module in question, or another import where the file does not import that module.
    hidden_B = torch.where(is_it_BW.any(1), module_B, imported_B)
    others_BW = dataset.modules_UW[file_B].where(dataset.modules_UW[file_B] != hidden_B[:, None], 0)
    return file_B, others_BW, module_B, is_it_BW.any(1).float(), names_B


def sample() -> Batch:
    """Sample batch for planning."""
    return batch(0, 0)


def _read() -> list[tuple[str, dict[str, int]]]:
    """Files, each with the number of names from each module."""
    files = []
    for name in DISTRIBUTIONS:
        for path in distribution(name).files or ():
            if path.suffix == ".py" and ".." not in path.parts:
                text = path.locate().read_text(encoding="utf-8", errors="replace")
                files.append((path.as_posix(), imports_of(path.parts[:-1], text)))
    return files


def imports_of(package: tuple[str, ...], text: str) -> dict[str, int]:
    """Number of names that the source of a file in a package imports from each module."""
    counts: Counter[str] = Counter()
    for origin, names, plain in STATEMENT.findall(text):
        if origin:
            inner = origin.lstrip(".")
            num_dots = len(origin) - len(inner)
            outer = package[: len(package) - num_dots + 1] if num_dots else ()
            module = ".".join([*outer, *([inner] if inner else [])])
            counts[module] += len(re.findall(r"[\w*]+(?:\s+as\s+\w+)?", re.sub(r"#.*", "", names)))
        else:
            for clause in plain.split(","):
                if module := clause.split(" as ")[0].strip():
                    counts[module] += 1
    counts.pop("", None)
    return dict(counts)


def _in_an_order(file: str, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The imports in an arbitrary but fixed order: the first one is held out."""
    return sorted(pairs, key=lambda pair: hashlib.sha256(f"{file} {pair[0]}".encode()).digest())
