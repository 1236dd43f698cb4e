"""Waits of the host for the device in a layer of experts and in a training step, and the host's own time in a step of a
decoder, on the rehearsal device: `python -m benchmarks.host_waits`.

The host's time is that of Python, autograd and dispatch, in seconds of a processor, without the launches themselves.
No GPU is needed: a wait is an operation whose result or size the host needs (`item`, `tolist`, `nonzero`, a copy to the
host), or a synchronous copy to the device. Each wait keeps Python from running ahead of the GPU.
"""

import os
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import results
from moe.spec import MoESpec
from moe.train.micro_batch_graphs import WARM_UP_PASSES
from tests.parity.combinations import ROUTERS, model_of, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape
from tests.rehearsal.kernels import host_seconds_of_steps
from tests.rehearsal.run import waits_of_layer, waits_of_step
from tests.rehearsal.test_kernels import decoder

LAYOUTS = (
    Degrees(), Degrees(expert=2), Degrees(expert=2, num_chunks=3), Degrees(expert=2, max_rows=9),
    Degrees(expert_tensor=2), Degrees(data=2, fsdp=2, expert_fsdp=2), Degrees(expert=2, tensor=2),
    Degrees(expert=2, ranks_per_node=1), Degrees(expert=4, ranks_per_node=2, max_rows=9),
)  # fmt: skip
STEPS = (
    Degrees(), Degrees(micro_batch_groups=2), Degrees(recompute="selective"), Degrees(recompute="full"),
    Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2),
)  # fmt: skip
NUM_STEPS = 12


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # in the pools' processes
    pools = Pools()
    layers: list[dict[str, Any]] = []
    width = max(map(len, ROUTERS))
    for degrees in LAYOUTS:
        print(f"A layer of experts, {degrees}")
        for router, fields in ROUTERS.items():
            spec = MoESpec(**{"num_experts": 4, "model_dim": 16, "hidden_dim": 24, "group_tokens": 32, **fields})
            waits_by_pass = pools[degrees.workers].run(waits_of_layer, spec, degrees)[0]
            layers.append({"layout": str(degrees), "router": router, **waits_by_pass})
            forward, backward = (sum(waits_by_pass[name].values()) for name in ("forward", "backward"))
            capacity = "no capacity" if spec.routing.capacity(32, 4) is None else "a capacity"
            print(
                f"  {router:{width}} {capacity:11} {forward} forward, {backward} backward{_dense_ranks(waits_by_pass)}"
            )
    steps: list[dict[str, Any]] = []
    for degrees in STEPS:
        waits, num_micro_batches = pools[degrees.workers].run(
            waits_of_step, model_of(), train_of(), degrees, Shape(groups=4)
        )[0]
        steps.append({"layout": str(degrees), "micro_batches": num_micro_batches, "waits": waits})
        print(f"A step of two layers and {num_micro_batches} micro-batches, {degrees}: {sum(waits.values())}")
        for place, number in waits.items():
            print(f"  {number} {place}")
    host_times = list(_host_times(pools))
    pools.close()
    figures = {"layers": layers, "steps": steps, "host_times": host_times}
    print(f"written to {results.write('host_waits', figures)}")


def _host_times(pools: Pools) -> Iterator[dict[str, Any]]:
    """The host's time in a step of a decoder with one micro-batch, with and without CUDA graphs."""
    for num_layers in (1, 2, 4):
        for cuda_graphs in (False, True):
            train = train_of("bfloat16", cuda_graphs=cuda_graphs)
            step_seconds = pools[1].run(
                host_seconds_of_steps, decoder(num_layers), train, Shape(groups=1, source=4, target=4), NUM_STEPS
            )[0]
            step_s = statistics.median(step_seconds[WARM_UP_PASSES + 1 :])
            print(f"A step of {num_layers} layers{', by graphs' * cuda_graphs}: {1e3 * step_s:.1f} ms of the host")
            yield {"layers": num_layers, "cuda_graphs": cuda_graphs, "host_s": round(step_s, 5)}


def _dense_ranks(waits_by_pass: Mapping[str, Mapping[str, int]]) -> str:
    return "".join(f"; {place}" for waits in waits_by_pass.values() for place in waits)


if __name__ == "__main__":
    main()
