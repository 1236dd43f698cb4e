"""Pipeline bubbles of equal stages in closed form."""

from typing import assert_never

from moe.plan.schedule.simulation import StageSeconds
from moe.spec.parallel import PipelineSchedule


def bubble_s(name: PipelineSchedule, num_ranks: int, stage: StageSeconds) -> float:
    """Seconds of a step in which a rank waits, if all stages take the same time and sending takes none.

    `stage`: of one virtual stage, a v-th of a rank's work, so the virtual stages shorten the bubble. With F, B and W
    the seconds of its passes (arXiv 2104.04473, section 2.2; 2401.10241, table 1): exact for at least
    `min_micro_batches`, in whole rounds if interleaved, and for ZB-V where neither F nor W is longer than B; a lower
    bound otherwise.
    """
    forward, backward_input, backward_weight = stage.forward, stage.backward_input, stage.backward_weight
    match name:
        case "gpipe" | "1f1b" | "interleaved":
            of_stage = forward + backward_input + backward_weight
        case "zero_bubble":
            of_stage = max(forward, backward_input, forward + backward_input - backward_weight)
        case "zb_v":
            of_stage = max(forward, backward_input, 2 * (backward_input - backward_weight))
        case _:
            assert_never(name)
    return (num_ranks - 1) * of_stage
