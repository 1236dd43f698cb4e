"""Findings of runs of parts of the grid are combined and compared bit for bit."""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from moe.spec import LanguageModelSpec
from tests.parity.__main__ import part
from tests.parity.combinations import OPTIONS, ROUTERS, model_of, train_of
from tests.parity.digests import digest_of_tensors, digests_of
from tests.parity.findings import Findings, combine, differences, read, read_all, read_or_run
from tests.parity.grid import NAMES, OF_ADAPTERS, model_of_row
from tests.parity.language_models import ATTENTIONS
from tests.parity.row import Row
from tests.parity.table import page_of_families, page_of_routers
from tests.parity.trajectory import Degrees, Shape, run

SAME = {"without": len(ROUTERS), "all": len(ROUTERS)}


def findings(number: int = 1, num_parts: int = 1, commit: str = "a") -> Findings:
    names = NAMES[number - 1 :: num_parts]
    rows = tuple(Row(name, 2, SAME, SAME, {f"switch, under {name}": {"losses": "1", "routing": "2"}}) for name in names)
    return Findings(commit, 3.0, rows)


@pytest.mark.parametrize("num_parts", [1, 3, len(NAMES)])
def test_parts_make_the_whole_table(tmp_path: Path, num_parts: int) -> None:
    for number in range(num_parts, 0, -1):
        findings(number, num_parts).write(tmp_path / f"{number}-of-{num_parts}.json")
    all_findings = read_all(tmp_path)
    assert all_findings.rows == findings().rows
    assert not all_findings.missing(NAMES)
    assert all_findings.minutes == 3.0 * num_parts
    for page in (page_of_routers, page_of_families):
        assert page(replace(all_findings, minutes=3.0)) == page(findings())


def test_what_was_found_at_the_same_commit_is_not_run_again(tmp_path: Path) -> None:
    path, (old_row, new_row, *_) = tmp_path / "1-of-1.json", findings().rows

    def fail() -> Row:
        raise AssertionError("it was run again")

    assert read_or_run(path, "a", lambda: old_row) == old_row
    assert read_or_run(path, "a", fail) == old_row
    for commit in ("b", "b-dirty", "b-dirty"):  # uncommitted changes may differ each time
        row, old_row, new_row = new_row, new_row, old_row
        assert read_or_run(path, commit, partial(replace, row)) == row
        assert (read(path).commit, read(path).rows) == (commit, (row,))


def test_a_part_says_what_it_has_not_and_parts_of_two_commits_are_not_put_together() -> None:
    assert combine([findings(1, 3), findings(3, 3)]).missing(NAMES) == list(NAMES[1::3])
    with pytest.raises(ValueError, match=r"these are of \['a', 'b'\]"):
        combine([findings(1, 2, "a"), findings(2, 2, "b")])
    assert part("2/3") == (2, 3)
    for text in ("0/3", "4/3", "1", "1/0", "-1/2", f"1/{len(NAMES) + 1}"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no K/N"):
            part(text)


def test_what_differs_is_named(tmp_path: Path) -> None:
    before = findings()
    digests = [{"losses": "1", "routing": "3"}, {}, {"losses": "1", "routing": "2"}]  # {}: it did not end
    rows = [
        replace(row, digests={f"switch, under {row.name}": digest})
        for row, digest in zip(before.rows[:3], digests, strict=True)
    ]
    after = Findings("b", 3.0, (*rows, *before.rows[4:]))
    assert differences(before, after) == [
        f"switch, under {NAMES[0]}: routing differ",
        f"switch, under {NAMES[1]}: did not end",
        f"switch, under {NAMES[3]}: only before",
    ]
    assert not differences(before, replace(before, commit="b"))
    before.write(tmp_path / "whole.json")
    assert read(tmp_path / "whole.json") == before
    row = replace(before.rows[1], num_same={"without": len(ROUTERS) - 2})
    text = page_of_routers(Findings("a", 1.0, (row,)))
    line = text.partition(NAMES[1].removeprefix("translation, "))[2].splitlines()[0]
    assert line.startswith(f" | 2 | {len(ROUTERS) - 2} of {len(ROUTERS)} same: **differs** | – |")
    row = replace(before.rows[-1], num_same={"expert": 3}, num_trainings={"expert": 4})
    assert "| – | 3 of 4 same: **differs** | – |" in page_of_families(Findings("a", 1.0, (row,)))


def test_a_digest_knows_every_bit_and_no_name() -> None:
    matrix, scalar = torch.ones(3, 2, dtype=torch.bfloat16), torch.tensor(0.0)
    assert digest_of_tensors([matrix, scalar]) == digest_of_tensors([scalar, matrix.t().contiguous().t()])
    assert digest_of_tensors([matrix, scalar]) != digest_of_tensors([matrix, -scalar])
    assert digest_of_tensors([matrix, matrix]) != digest_of_tensors([matrix])


def test_the_digests_of_a_trajectory_see_each_thing_that_it_records() -> None:
    def digests(router_fields: dict[str, object], peak_lr: float = 2.5e-3, num_steps: int = 2) -> dict[str, str]:
        optimizer = train_of().optimizer.model_copy(update={"peak_lr": peak_lr})
        return digests_of(run(model_of(**router_fields), train_of(optimizer=optimizer), Degrees(), Shape(), num_steps))

    first = digests({})
    assert first == digests({})
    assert set(first) == {"losses", "layers", "routing", "gradients", "parameters", "moments"}
    assert all(value != first[kind] for kind, value in digests(ROUTERS["switch"]).items())
    nearly = digests({}, peak_lr=2.5e-3 * (1 + 1e-12))
    assert {kind for kind in first if nearly[kind] != first[kind]} >= {"parameters", "gradients", "losses"}


@pytest.mark.slow
def test_the_grid_meets_every_kind_of_attention_and_of_adapter() -> None:
    """In rows of the language model, whose models take turns, and under each layout that splits adapters."""
    language_rows = [index for index, name in enumerate(NAMES) if name.startswith("language, ")]
    assert len(language_rows) == sum(name.startswith("translation, ") for name in NAMES)
    combinations = {
        (attention, setting)
        for index in language_rows
        for option in OPTIONS
        for router in ROUTERS
        for attention in [model_of_row(index, option, router)[0].removesuffix(f", {router}")]
        for setting in (NAMES[index], option, router)
    }
    settings = (*(NAMES[index] for index in language_rows), *OPTIONS, *ROUTERS)
    assert combinations == {(attention, setting) for attention in ATTENTIONS for setting in settings}

    rows = [index for index, name in enumerate(NAMES) if name.startswith("adapters, ")]
    assert {NAMES[index].partition(": ")[0].removeprefix("adapters, ") for index in rows} == set(OF_ADAPTERS)
    models = [model_of_row(index, option, router)[1] for index in rows for option in OPTIONS for router in ROUTERS]
    adapters = [model.adapter for model in models if isinstance(model, LanguageModelSpec)]
    assert len(adapters) == len(models)
    assert all(adapters)
    for field in ("rank", "alpha", "rank_stabilized", "dropout", "targets"):
        assert len({getattr(adapter, field) for adapter in adapters}) > 1
    repeated_models = [model_of_row(rows[0], "without", router)[1] for router in ROUTERS]
    assert repeated_models == models[: len(ROUTERS)], "the same in every run"
