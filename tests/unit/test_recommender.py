"""The example's recommender: its data comes from the installed packages and is the same in each process, and it
learns."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from recommender import data, model, score

from moe.spec import JobSpec
from moe.tasks.module.build import digest
from moe.tasks.module.code import functions_of, import_function

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_its_job_names_functions_that_are_there() -> None:
    spec = JobSpec.parse(yaml.safe_load((EXAMPLES / "recommender" / "job.yaml").read_text()))
    functions = [import_function(code, path) for path, code in functions_of(spec).items()]
    assert functions == [model.build, data.batch]


def test_what_a_file_imports_is_read_from_its_source() -> None:
    source = (
        "import os, sys as system\nfrom . import views  # and others\n"
        "from ..db import (\n    Field,\n    Model as M,\n)\n"
        "if True:\n    from django.apps import *\nimportant = 1\n'from here import nothing'\n"
    )
    expected = {"os": 1, "sys": 1, "shop.web": 1, "shop.db": 2, "django.apps": 1}
    assert data.imports_of(("shop", "web"), source) == expected


@pytest.mark.slow
def test_batches_are_the_same_in_another_process() -> None:
    script = (
        "from recommender import data; from moe.tasks.module.build import digest; "
        "print(data.imports().digest, digest(data.batch(3, 7)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}", "PYTHONHASHSEED": "5", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout.split() == [data.imports().digest, digest(data.batch(3, 7))]
    assert digest(data.batch(3, 8)) != digest(data.batch(3, 7)) != digest(data.batch(4, 7))


@pytest.mark.slow
def test_no_batch_tells_what_is_to_be_found() -> None:
    imports = data.imports()
    assert not (imports.modules_UW == imports.held_out_U[:, None]).any(), "held out"
    file_B, others_BW, module_B, is_imported_B, names_B = data.batch(0, 0)
    assert not (others_BW == module_B[:, None]).any()
    assert (imports.modules_UW[file_B] == module_B[:, None]).any(1).equal(is_imported_B.bool())
    assert (names_B > 0).equal(is_imported_B.bool())
    num_others_B, num_imports_B = (others_BW > 0).sum(1), (imports.modules_UW[file_B] > 0).sum(1)
    assert (num_others_B == num_imports_B - 1).all(), "however it is with the module in question"


@pytest.mark.slow
def test_it_finds_what_was_held_out_sooner_than_popularity_does() -> None:
    torch.manual_seed(0)
    recommender, imports = model.build(num_users=len(data.imports().files)), data.imports()
    optimizer = torch.optim.AdamW(recommender.parameters(), lr=0.02)
    losses = []
    for step in range(200):
        optimizer.zero_grad()
        loss = recommender(*data.batch(0, step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    files_U = torch.arange(0, len(imports.files), 80)
    scores_UI = score.scores(recommender.eval(), imports, files_U)[..., 0]
    recall, auc = score.ranking(scores_UI, imports, files_U)
    popular = score.ranking(score.popularity(imports, files_U)[..., 0], imports, files_U)
    assert (recall > popular[0], auc > popular[1] + 0.05) == (True, True), f"{recall, auc} {popular}"
