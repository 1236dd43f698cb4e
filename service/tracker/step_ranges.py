"""Set of steps as few ranges."""

from bisect import bisect_right


class StepRanges:
    """Steps that were written. Runs write almost all in order, so one range or two hold them."""

    def __init__(self, last_step: int | None = None) -> None:
        """Steps up to `last_step`."""
        self._ranges: list[tuple[int, int]] = [] if last_step is None else [(0, last_step)]

    def __contains__(self, step: int) -> bool:
        index = bisect_right(self._ranges, (step, 2**63)) - 1
        return index >= 0 and step <= self._ranges[index][1]

    def add(self, step: int) -> None:
        if step in self:
            return
        index = bisect_right(self._ranges, (step, step))
        first = last = step
        if index < len(self._ranges) and self._ranges[index][0] == step + 1:
            last = self._ranges.pop(index)[1]
        if index and self._ranges[index - 1][1] == step - 1:
            index -= 1
            first = self._ranges.pop(index)[0]
        self._ranges.insert(index, (first, last))

    def cut(self, step: int) -> None:
        """Remove `step` and all later ones."""
        self._ranges = [(first, min(last, step - 1)) for first, last in self._ranges if first < step]
