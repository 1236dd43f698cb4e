"""One rank of a worker group: sends the bytes by which its process grows in a second micro-batch."""

import ctypes
import re
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from moe.interface import LOOPBACK, listen_on
from moe.layers.nll import smoothed_nll
from moe.parallel import Layout
from moe.plan import Plan
from moe.spec import JobSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.translation import build_model

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
GIVE_BACK = ((-3, 1 << 16), (-1, 0))
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's <malloc.h>: freed blocks are returned to the system. Otherwise a
process keeps its peak, and does not grow again."""


def resident(field: str) -> int:
    """Bytes of `VmRSS` (current) or `VmHWM` (peak)."""
    (kilobytes,) = re.findall(rf"{field}:\s+(\d+) kB", STATUS.read_text())
    return 1024 * int(kilobytes)


def growth(spec: JobSpec, plan: Plan, length: int) -> int:
    """Bytes in addition to parameters and gradients, which all exist after the first micro-batch."""
    layout = Layout.build(plan)
    model = build_model(spec.model, layout, dtype=getattr(torch, spec.train.dtype))
    moe = spec.model.moe
    rows_per_group = max(1, moe.group_tokens // 2 // length) if moe else 1
    rows = plan.options.micro_batch_groups * (spec.group_tokens // 2 // length)
    tokens = torch.randint(5, 300, (rows, length), generator=torch.Generator().manual_seed(0))
    before = 0
    for micro_batch in range(2):
        if micro_batch:
            before = resident("VmRSS")
            CLEAR.write_text(RESET_PEAK)
        hidden_states = model.hidden_states(tokens, tokens, BatchContext(rows_per_group=rows_per_group))
        loss, _ = smoothed_nll(hidden_states, model.output_embedding, model.share(tokens), 0.1, 0)
        loss.backward()
        del hidden_states, loss
    return resident("VmHWM") - before


def main(rank: int, spec: JobSpec, plan: Plan, rendezvous: str, answer: Connection) -> None:
    libc = ctypes.CDLL(None)
    for parameter, value in GIVE_BACK:
        assert libc.mallopt(parameter, value) == 1
    torch.set_num_threads(1)
    if plan.num_workers > 1:
        listen_on(LOOPBACK)
        dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=plan.num_workers)
    answer.send(growth(spec, plan, spec.data.max_tokens))
    if plan.num_workers > 1:
        dist.barrier()
        dist.destroy_process_group()
