"""Planning of users' modules in a process of its own: its plans, and its end when it exceeds its limits."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe.plan import Cluster, Plan, PlanQuery, PlanRequest
from moe.spec import JobSpec, SpecError
from service.control.api.services import Services
from service.control.errors import Unavailable
from service.control.jobs.data_roots import DataRoots
from service.control.jobs.roots import StorageRoots
from service.control.scheduling.job_plans import JobPlans
from service.control.scheduling.module_plans import MAX_WAITING, ModulePlans
from service.planner import planning_process
from service.planner.planning_process import PlanningCancellation, PlanningLimits, ask
from service.planner.request import JobRequest
from service.tracker.places import TrackerPlaces
from tests.processes import await_that
from tests.procs.launching import launch
from tests.refusals import expect_problem

CODE = "tests.service.users_module"
BATCH = f"{CODE}:batch"
ROOT = Path(__file__).parents[2]
TWO = Cluster(num_nodes=1, devices_per_node=2)


@pytest.fixture(autouse=True)
def _found_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def module_job(build: str, num_steps: int = 2, **model: Any) -> JobSpec:
    return JobSpec.parse({
        "model": {"kind": "module", "build": build, **model},
        "data": {"corpus": "module", "batches": BATCH}, "train": {"num_steps": num_steps},
    })  # fmt: skip


def plan_module(build: str = "build", limits: PlanningLimits | None = None, **model: Any) -> Plan:
    code = f"{CODE}:{build}"
    request = JobRequest(spec=module_job(code, **model), cluster=TWO, allowed_code=(code, BATCH))
    return Plan.model_validate(ask(request, limits or PlanningLimits(60.0, 4 << 30)).plan)


def fault(build: str, limits: PlanningLimits | None = None, **model: Any) -> str:
    with pytest.raises(SpecError) as error:
        plan_module(build, limits, **model)
    (problem,) = error.value.problems
    assert (problem.path, problem.value) == ("model.build", f"{CODE}:{build}")
    return f"{problem.rule}; {problem.remedy}"


@pytest.mark.slow
def test_a_job_of_a_module_has_a_plan_that_holds_its_own() -> None:
    plan = plan_module(hints={"items.weight": {"split": 0}})
    assert (plan.num_workers, plan.mesh, plan.tokens_per_step) == (2, {"devices": 2}, 12)
    assert plan.module.plan["parameters"]["items.weight"] == "S(0)"
    assert "items.weight" in plan.module.explained
    assert min(plan.predicted.step_s, plan.memory.parameters) > 0
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert plan_module(hints={"items.weight": {"split": 0}}).module == plan.module
    assert plan_module("prints").module == plan_module().module, "what its code prints is no part of the plan"


@pytest.mark.slow
def test_planning_beyond_its_time_limit_is_ended_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pids"

    class Clock:
        """Jumps past the limit as soon as the module's code runs, however long its imports took."""

        @staticmethod
        def monotonic() -> float:
            return 601.0 if note.exists() and len(note.read_text().split()) == 2 else 0.0

    # Only the time is fake, since imports may take longer than any limit: the process, the user's code in it,
    # that code's child and their end are real.
    monkeypatch.setattr(planning_process, "time", Clock)
    message = fault("sleeps", PlanningLimits(600.0, 4 << 30), options={"note": str(note)})
    assert message.startswith("exceeds the planning time limit of 600 s")
    assert not any(_runs(int(pid)) for pid in note.read_text().split())


@pytest.mark.slow
def test_one_that_takes_too_much_memory_is_told_so() -> None:
    message = fault("eats", PlanningLimits(60.0, 2 << 30))
    assert message.startswith("needs more memory than planning may use (=2,147,483,648 bytes)")
    assert "SHARDYARD_PLANNING_MEMORY_BYTES" in message


@pytest.mark.slow
def test_what_its_code_raises_is_told_with_the_line() -> None:
    assert "cannot be planned: KeyError: 'no such layer' (users_module.py:" in fault("raises")
    assert "crashed the process that plans it (exit status 3): giving up" in fault("exits")
    assert "must return a torch.nn.Module, not int" in fault("gives_a_number")
    with pytest.raises(SpecError, match=r"users_module.py:\d+ \(='Reader'\) must not read a tensor's values"):
        plan_module("reads_values")


def test_the_process_compares_once_more_before_it_imports() -> None:
    spec = module_job("no_such_package:build")
    with expect_problem("not_allowed", "model.build", "no_such_package:build"):
        ask(JobRequest(spec=spec, cluster=TWO, allowed_code=(BATCH,)), PlanningLimits(60.0))


@pytest.mark.slow
def test_a_jobs_module_is_not_looked_for_in_the_present_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    with expect_problem("not_found", "data.batches", "tests.service.users_module:batch"):
        plan_module()


@pytest.mark.slow
def test_it_has_none_of_the_services_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDYARD_TOKEN", "a-secret-of-the-service")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    dump = tmp_path / "environment.json"
    (tmp_path / "looks_around.py").write_text(
        f"import json, os\nopen({str(dump)!r}, 'w').write(json.dumps(dict(os.environ)))\nfrom {CODE} import build\n"
    )
    request = JobRequest(spec=module_job("looks_around:build"), cluster=TWO, allowed_code=("looks_around:build", BATCH))
    ask(request, PlanningLimits(60.0))
    assert "a-secret-of-the-service" not in dump.read_text()
    assert json.loads(dump.read_text())["PATH"] == os.environ["PATH"]


@pytest.mark.slow
def test_a_service_that_stops_does_not_wait_for_it(tmp_path: Path) -> None:
    note, limits = tmp_path / "pids", PlanningLimits(600.0, 4 << 30)

    def stop() -> None:
        await_that(note.exists)
        limits.stop_event.set()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(PlanningCancellation):
        plan_module("sleeps", limits, options={"note": str(note)})
    stopper.join()
    assert not any(_runs(int(pid)) for pid in note.read_text().split())


@pytest.mark.slow
def test_one_is_planned_at_a_time_and_few_may_wait(tmp_path: Path) -> None:
    note, woken = tmp_path / "pids", threading.Event()
    codes = tuple(f"{CODE}:{name}" for name in ("sleeps", "build", "batch"))
    sleeps, quick = codes[:2]
    plans = ModulePlans(codes, 600.0, 4 << 30, woken.set)
    assert plans.begin(module_job(quick, 1), TWO) is None
    assert woken.wait(60)
    plan = plans.begin(module_job(quick, 1), TWO)
    assert plan is not None
    assert plans.wait_for_plan(module_job(quick, 1), TWO) is plan  # which is kept for a while
    for number in range(MAX_WAITING):
        assert plans.begin(module_job(sleeps, 1 + number, options={"note": str(note)}), TWO) is None
    with pytest.raises(Unavailable, match="other modules are being planned; try again in a minute"):
        plans.begin(module_job(quick, 2), TWO)
    await_that(note.exists)
    plans.close()
    assert not any(_runs(int(pid)) for pid in note.read_text().split())


@pytest.mark.slow
def test_it_ends_with_whoever_asked(tmp_path: Path) -> None:
    """Even when the asking process is killed and can end nothing."""
    note = tmp_path / "pids"
    call = f"plan_module('sleeps', PlanningLimits(600.0), options={{'note': {str(note)!r}}})"
    code = f"from tests.service.test_module_planning import plan_module, PlanningLimits\n{call}"
    asker = subprocess.Popen([sys.executable, "-c", code])
    try:
        await_that(lambda: note.exists() and len(note.read_text().split()) == 2)
    finally:
        asker.kill()
        asker.wait()
    child, sleeper = map(int, note.read_text().split())
    await_that(lambda: not _runs(child))
    os.kill(sleeper, signal.SIGKILL)


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


class RecordedPlans(ModulePlans):
    """Plans every module in the same way, and notes for which cluster."""

    def __init__(self, plan: Plan) -> None:
        super().__init__((), 1.0, 1, lambda: None)
        self._plan, self.clusters = plan, list[Cluster]()

    def wait_for_plan(self, spec: JobSpec, cluster: Cluster) -> Plan:
        self.clusters.append(cluster)
        return self._plan


def test_the_plan_is_for_the_cluster_of_the_request_or_else_this_one(services: Services, tmp_path: Path) -> None:
    modules = RecordedPlans(launch(tmp_path).plan)
    roots = StorageRoots([str(tmp_path)])
    plans = JobPlans(
        services.watch, roots, DataRoots((), ""), allowed_code=(f"{CODE}:build", BATCH), modules=modules,
        trackers=TrackerPlaces(str(tmp_path), ""),
    )  # fmt: skip
    query = PlanQuery(num_workers=3)
    for cluster in (None, Cluster(num_nodes=3, devices_per_node=1)):
        request = PlanRequest(spec=module_job(f"{CODE}:build"), cluster=cluster, query=query)
        assert plans.make_plan(request).num_workers == launch(tmp_path).plan.num_workers
    assert [(cluster.num_nodes, cluster.devices_per_node) for cluster in modules.clusters] == [(1, 3), (3, 1)]
    modules.close()
