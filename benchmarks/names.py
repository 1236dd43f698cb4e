"""Uninformative names: pronouns (`each`) and participles (`found`) among all names that the product's code binds, and
class names with several meanings. Limit: 1% of all names, and no class name with two meanings.

A name is bound by an assignment, a loop, a parameter, an import's alias, a function or a class. It counts as a
participle if all of it is one: `kept`, and not `is_kept` or `kept_rows`. Python's own, as `__all__`, are left out.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks import results

ROOT = Path(__file__).parents[1]
PACKAGES = ("moe", "service")
LIMIT = 0.01

_PRONOUNS = (
    "all another any both each either every everyone everything few fewer here him his it its many mine more most "
    "neither no nobody none nothing one ones other others our ours same several some something such that theirs them "
    "there these they this those us what whatever which who whom whose yours"
)
PRONOUNS = frozenset(_PRONOUNS.split())

_IRREGULAR = (
    "begun bent born bound bought brought built caught chosen come dealt done drawn driven eaten fallen felt forgotten "
    "found frozen given gone grown had heard held hidden hit kept known laid led lent let lost made meant met paid "
    "risen said seen sent shown shut sold sought spent spoken stood stuck sworn taken taught thought thrown told torn "
    "understood won worn written"
)
IRREGULAR_PARTICIPLES = frozenset(_IRREGULAR.split())
NO_PARTICIPLES = frozenset(["bed", "breed", "embed", "feed", "hundred", "need", "seed", "shed", "speed"])
"""Words that end like participles but are not."""


def is_empty(name: str) -> bool:
    """Whether a name is a pronoun or a participle."""
    if name.startswith("__") and name.endswith("__"):
        return False
    word = name.strip("_")
    if word in PRONOUNS:
        return True
    looks_regular = word.endswith("ed") and word.isalpha() and len(word) > 3
    return word in IRREGULAR_PARTICIPLES or (looks_regular and word not in NO_PARTICIPLES)


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Names that a module's code binds, once for each binding."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(asname=str(name)):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name


def measure() -> dict[str, object]:
    names: Counter[str] = Counter()
    classes: dict[str, set[str]] = defaultdict(set)
    num_lines = 0
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            num_lines += text.count("\n")
            tree = ast.parse(text)
            names.update(bound_names(tree))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    classes[node.name.lstrip("_")].add(str(path.relative_to(ROOT)))
    empty = Counter({name: count for name, count in names.items() if is_empty(name)})
    total = names.total()
    return {
        "lines": num_lines,
        "bound_names": total,
        "pronouns_and_participles": empty.total(),
        "share": round(empty.total() / total, 4),
        "limit": LIMIT,
        "most_frequent": dict(empty.most_common(40)),
        "class_names_in_several_files": {
            name: sorted(paths) for name, paths in sorted(classes.items()) if len(paths) > 1
        },
    }


def main() -> None:
    figures = measure()
    print(f"{figures['lines']:,} lines; {figures['pronouns_and_participles']:,} of {figures['bound_names']:,} names "
          f"are pronouns or participles ({figures['share']:.2%}, limit {LIMIT:.0%})")  # fmt: skip
    print(", ".join(f"{name} {count}" for name, count in figures["most_frequent"].items()))  # type: ignore[attr-defined]
    repeated_classes = figures["class_names_in_several_files"]
    print(f"{len(repeated_classes)} class names in several files: {', '.join(repeated_classes)}")  # type: ignore[arg-type]
    print(f"written to {results.write('names', figures)}")


if __name__ == "__main__":
    main()
