"""How often the host waits for the device in a layer of experts, by router and layout, on the rehearsal device.

No GPU is needed: a wait is an operation whose result, or its size, the host asks for (`item`, `tolist`, `nonzero`, a
copy to it). Each keeps a GPU from running ahead of Python.
"""

from typing import Any

from benchmarks import results
from moe.spec import MoESpec
from tests.parity.combinations import ROUTERS
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees
from tests.rehearsal.run import waits_of_layer

LAYOUTS = (
    Degrees(), Degrees(expert=2), Degrees(expert=2, num_chunks=3), Degrees(expert=2, max_rows=9),
    Degrees(expert=2, tensor=2), Degrees(expert=2, ranks_per_node=1), Degrees(expert=4, ranks_per_node=2),
)  # fmt: skip


def main() -> None:
    pools = Pools()
    cases: list[dict[str, Any]] = []
    for degrees in LAYOUTS:
        for router, fields in ROUTERS.items():
            spec = MoESpec(
                **{"num_experts": 4, "model_dim": 16, "hidden_dim": 24, "group_tokens": 32, **fields}
            )
            found = pools[degrees.workers].run(waits_of_layer, spec, degrees)[0]
            cases.append({"layout": str(degrees), "router": router, **found})
    pools.close()
    for degrees in LAYOUTS:
        here = [case for case in cases if case["layout"] == str(degrees)]
        forward, backward = ({sum(case[name].values()) for case in here} for name in ("forward", "backward"))
        print(f"{degrees}: {_span(forward)} forward, {_span(backward)} backward, of {len(here)} routers")
        for where in sorted(
            {where for case in here for name in ("forward", "backward") for where in case[name]}
        ):
            print(f"    {where}")
    print(f"written to {results.write('host_waits', {'cases': cases})}")


def _span(numbers: set[int]) -> str:
    return str(min(numbers)) if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"


if __name__ == "__main__":
    main()
