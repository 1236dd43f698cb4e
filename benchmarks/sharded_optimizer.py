"""AdamW over 150 parameters, each sharded over two gloo ranks: on plain tensors of the shards' sizes, on the shards of
an applied module, with and without `sharding.local_steps`, and on DTensors. Contenders take turns; a round's time is
that of the slower rank.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks import results
from moe import sharding
from moe.plan import Cluster
from moe.sharding.applied.dtensors import local

RANKS, LAYERS, WIDTH, ROUNDS, WARM_UP = 2, 75, 64, 60, 5
FORMS: dict[str, dict[str, bool]] = {"one by one": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
LOCAL = "parts, local_steps"
CONTENDERS = ("plain tensors", "parts of an applied module", LOCAL, "DTensors")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _mean(y: Tensor) -> Tensor:
    return y.mean()


def _parts() -> list[nn.Parameter]:
    model = _model()
    cluster = Cluster(num_nodes=1, devices_per_node=RANKS, device="cpu", memory_bytes=8 * 1024**3)
    sample, hints = (torch.zeros(4, WIDTH),), {"*": sharding.Split(0)}
    plan = sharding.plan(model, sample, cluster, hints, _mean, mesh={"all": RANKS}, search=False)
    applied = sharding.apply(model, plan, loss=_mean)
    applied(torch.randn(4, WIDTH)).backward()
    return list(applied.parameters())


def _dtensors() -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (RANKS,))
    parameters = []
    for full_parameter in _model().parameters():
        parameter = nn.Parameter(distribute_tensor(full_parameter.detach(), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(torch.randn_like(full_parameter), mesh, [Shard(0)])
        parameters.append(parameter)
    return parameters


def _plain(parts: list[nn.Parameter]) -> list[nn.Parameter]:
    parameters = []
    for part in parts:
        parameter = nn.Parameter(local(part.detach()).clone())
        parameter.grad = torch.randn_like(parameter)
        parameters.append(parameter)
    return parameters


def work(rank: int, rendezvous: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=RANKS)
    parts = _parts()
    parameters = dict(zip(CONTENDERS, (_plain(parts), parts, parts, _dtensors()), strict=True))
    steps = {
        (name, form): _step(name, torch.optim.AdamW(form_parameters, **options))
        for name, form_parameters in parameters.items()
        for form, options in FORMS.items()
    }
    times = {key: _step_seconds(step, WARM_UP) and [] for key, step in steps.items()}
    for _ in range(ROUNDS):
        for key, step in steps.items():
            times[key] += _step_seconds(step, 1)
    if rank == 0:
        assert all(len(form_parameters) == 2 * LAYERS for form_parameters in parameters.values())
        answer.send({form: {name: statistics.median(times[name, form]) for name in CONTENDERS} for form in FORMS})
    dist.barrier()
    dist.destroy_process_group()


def _step(name: str, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    return sharding.local_steps(optimizer).step if name == LOCAL else optimizer.step


def _step_seconds(step: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each step on the slower rank."""
    round_s = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        step()
        seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        round_s.append(float(seconds))
    return round_s


def measure() -> dict[str, dict[str, float]]:
    """Median seconds of a step, by form and contender."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe()
        processes = [context.Process(target=work, args=(rank, f"{folder}/rendezvous", sender)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        sender.close()  # so that recv ends when the ranks do
        times_by_form: dict[str, dict[str, float]] = receiver.recv()
        for process in processes:
            process.join()
    return times_by_form


def main() -> None:
    forms = measure()
    print(f"a step of AdamW over {2 * LAYERS} parameters, half of each on each of {RANKS} ranks, in ms")
    print(f"{'':12}" + "".join(f"{name:>28}" for name in CONTENDERS))
    for form, times in forms.items():
        print(f"{form:12}" + "".join(f"{1000 * times[name]:28.2f}" for name in CONTENDERS))
    figures = {
        "ranks": RANKS, "parameters": 2 * LAYERS, "width": WIDTH, "rounds": ROUNDS,
        "step_ms": {
            form: {name: round(1000 * seconds, 3) for name, seconds in times.items()} for form, times in forms.items()
        },
    }  # fmt: skip
    print(f"written to {results.write('sharded_optimizer', figures)}")


if __name__ == "__main__":
    main()
