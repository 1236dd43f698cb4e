"""Writes the chart's templates: `python -m k8s.chart_builder`."""

import re
import sys
from pathlib import Path

from k8s.chart_builder.features import FEATURES, K8S, Objects, render
from k8s.chart_builder.rules import Rules
from k8s.chart_builder.template import object_template
from k8s.chart_builder.variants import ABSENT, Change, Variants

TEMPLATES = K8S / "chart" / "templates"
HEADER = "{{- /* Made by `python -m k8s.chart_builder` from k8s/base and k8s/components: change those. */ -}}\n"


def build() -> dict[str, str]:
    """Text of each made template, by file name. Raises LookupError if a rule applies to no field."""
    rendered: dict[tuple[str, ...], Objects] = {}

    def objects_with(components: tuple[str, ...]) -> Objects:
        if components not in rendered:
            rendered[components] = render(components)
        return rendered[components]

    base = objects_with(())
    pairs = [(feature, objects_with(feature.upon), objects_with((*feature.upon, feature.component)))
             for feature in FEATURES]  # fmt: skip
    names = dict.fromkeys([*base, *(name for _, _, after in pairs for name in after)])
    rules, files = Rules(), dict[str, str]()
    for kind, name in names:
        changes = tuple(
            Change(feature, before.get((kind, name), ABSENT), after.get((kind, name), ABSENT))
            for feature, before, after in pairs
        )
        text = object_template(kind, name, Variants.of(base.get((kind, name), ABSENT), changes), rules)
        file = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind).lower() + ".yaml"
        files[file] = files.get(file, HEADER) + text
    if unused := rules.unused():
        raise LookupError(f"no field of the manifests has these paths of rules.py: {', '.join(unused)}")
    return files


def main() -> int:
    files = build()
    for path in TEMPLATES.glob("*.yaml"):
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        Path(TEMPLATES, name).write_text(text)
    print(f"wrote {len(files)} templates to {TEMPLATES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
