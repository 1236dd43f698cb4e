"""Ranks in `show` and `watch`: what each does, which are silent, and how GPUs are used, where there are any."""

from typing import Any

from rich.console import Console

from service.cli.view.ranks import MAX_SHOWN, gpu_use, rank_rows, ranks_in_words

GIB = 1 << 30


def rank(number: int, doing: str = "step 12", silent_s: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "rank": number, "host": "node-a", "pid": 100 + number, "phase": "step", "doing": doing, "for_s": 2.0,
        "idle_s": 0.0, "silent_s": silent_s, "device": None, **more,
    }  # fmt: skip


def run(*ranks: dict[str, Any], num_ranks: int | None = None, silent_s: float = 0.5) -> dict[str, Any]:
    count = len(ranks) if num_ranks is None else num_ranks
    return {"silent_s": silent_s, "host": "node-a", "pid": 99, "num_ranks": count, "ranks": list(ranks)}


def shown(of_run: dict[str, Any]) -> list[str]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(rank_rows(of_run))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def gpu(share: float | None, used: int) -> dict[str, Any]:
    return {"utilization": share, "memory_bytes": used * GIB, "memory_total_bytes": 80 * GIB}


def test_each_rank_has_a_row_and_without_gpus_nothing_is_said_of_any() -> None:
    of_run = run(rank(0), rank(1, "all-reduce of gradients", silent_s=25.0))
    assert shown(of_run) == [
        "0 step 12 for 0:02 last seen 0:01 ago node-a:100",
        "1 all-reduce of gradients for 0:02 last seen 0:25 ago node-a:101",
    ]
    assert gpu_use(of_run) == ""


def test_gpus_are_shown_by_rank_and_together() -> None:
    of_run = run(rank(0, device=gpu(0.9, 40)), rank(1, device=gpu(0.5, 60)))
    assert shown(of_run)[0].endswith("90%, 40.00 GiB of 80.00 GiB")
    assert gpu_use(of_run) == "70% busy (least busy 50%), 60.00 GiB of 80.00 GiB in use on the fullest"
    assert gpu_use(run(rank(0, device=gpu(None, 8)))) == "8.00 GiB of 80.00 GiB in use"


def test_a_silent_driver_and_ranks_that_are_left_out_are_told() -> None:
    many = [rank(number) for number in range(63)] + [rank(900, silent_s=40.0)]
    lines = shown(run(*many, num_ranks=1000, silent_s=30.0))
    assert lines[MAX_SHOWN - 1].startswith("900 step 12")
    assert lines[-2:] == ["and 984 more", "as of 0:30 ago: the driver (process 99 on node-a) is silent"]


def test_the_line_of_a_display_names_what_most_do_and_who_is_silent() -> None:
    line = ranks_in_words(run(*(rank(number) for number in range(3)), rank(3, "checkpoint", silent_s=21.0)))
    assert line is not None
    assert line.plain == "4 ranks: step 12 (3), checkpoint (1); rank 3 silent for 0:21"
    assert ranks_in_words(run()) is None
    one = ranks_in_words(run(rank(0, "step 7\x1b[2J")))
    assert one is not None
    assert one.plain == "1 rank: step 7 [2J"
