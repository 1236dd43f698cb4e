"""Example specs among the static files: starting points of a job."""

from dataclasses import dataclass

from service.web.static_files import StaticFiles

_FOLDER = "examples/"


@dataclass(frozen=True)
class Example:
    """A spec that a page offers."""

    name: str
    url: str


def example_files(static: StaticFiles) -> list[Example]:
    """Examples by name, the small translation model, which runs anywhere, first."""
    names = [name for name in static.names if name.startswith(_FOLDER)]
    first = f"{_FOLDER}translate-100-to-english.yaml"
    return [
        Example(name.removeprefix(_FOLDER).removesuffix(".yaml"), static.url(name))
        for name in sorted(names, key=lambda name: (name != first, name))
    ]
