"""Workers that a node holds."""


def slots(cpus: float, gpus: float, cpus_per_worker: int, gpus_per_worker: int) -> int:
    """Workers of this size that a node with these resources holds."""
    by_cpu = int(cpus // cpus_per_worker)
    return min(by_cpu, int(gpus // gpus_per_worker)) if gpus_per_worker else by_cpu
