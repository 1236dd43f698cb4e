"""Rows that a run of the grid has yet to run, in their order."""

from collections.abc import Mapping, Sequence

from tests.parity.records import Record


def wanted_rows(
    num_trainings: Mapping[str, Mapping[str, int]],
    records: Mapping[str, Record],
    commits: Sequence[str],
    only_missing: bool = False,
) -> list[str]:
    """Names of the rows to run: those without a record, those with other trainings than now, those that differ from one
    process, and, unless `only_missing`, those of other commits than the last one, oldest first.

    `num_trainings` has the trainings of each row by column, and `commits` the full names of this commit and its
    ancestors, the newest first.
    """
    ages = {commit: age for age, commit in enumerate(commits)}

    def rank(name: str) -> tuple[int, int]:
        record = records.get(name)
        if record is None:
            return 0, 0
        if record.num_trainings != num_trainings[name]:
            return 1, 0
        return (2, 0) if record.differs else (3, -ages.get(record.commit, len(ages)))

    ranks = {name: rank(name) for name in num_trainings}
    is_wanted = {name: rank[0] < 3 or (rank[1] < 0 and not only_missing) for name, rank in ranks.items()}
    return sorted((name for name, wanted in is_wanted.items() if wanted), key=ranks.__getitem__)
