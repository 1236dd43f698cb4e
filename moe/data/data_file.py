"""User files named in a job spec."""

from collections.abc import Sequence
from dataclasses import dataclass

from moe.data.locations import Location, Locator
from moe.spec import ProblemCode, SpecError, spec_error


@dataclass(frozen=True)
class DataFile:
    """An existing file, and the place in the spec that names it."""

    place: str
    """Path in the spec: `data.sources[0].paths[1]`."""
    location: Location

    def broken(self, code: ProblemCode, rule: str, remedy: str, position: str = "") -> SpecError:
        """Error in the file; `position`, such as `, line 3`, is appended to its name."""
        return spec_error(code, self.place, f"{self.location}{position}", rule, remedy)

    def unreadable(self, error: Exception, position: str = "") -> SpecError:
        """Error of a file that is damaged or gone."""
        return self.broken("unreadable", f"cannot be read: {error}", "repair the file", position)


def locate_files(
    locator: Locator, place: str, paths: Sequence[str], seen_locations: set[Location] | None = None
) -> list[DataFile]:
    """Files that the paths at `place` name, in order, without repetition. Files in `seen` are omitted, and others added
    to it. Raises SpecError."""
    seen_locations = set() if seen_locations is None else seen_locations
    files = []
    for number, path in enumerate(paths):
        for location in locator.locate(f"{place}[{number}]", path):
            if location not in seen_locations:
                files.append(DataFile(f"{place}[{number}]", location))
            seen_locations.add(location)
    return files
