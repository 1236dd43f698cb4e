"""Sentences on how a plan is priced, and warnings where its predictions are uncertain."""

from collections.abc import Iterator, Sequence

from moe.plan.cluster.cluster import Cluster
from moe.plan.degrees import Degrees
from moe.plan.plan import Plan
from moe.plan.quantities import format_seconds, pluralize
from moe.plan.software import Software
from moe.plan.speed import describe_speed


def software_reason(software: Software, ends_s: Sequence[float]) -> Iterator[str]:
    """Reason about the software; none if measured with the device."""
    spread = ""
    if ends_s:
        low_s, high_s = sorted(ends_s)
        spread = f"; between its bounds a step takes {format_seconds(low_s)} to {format_seconds(high_s)}"
    if software.error is not None:
        yield (
            f"priced with {software.name}, whose mean error is {software.error:.0%} on published runs held out of its "
            f"fit{spread}"
        )
    elif software.fitted_on:
        yield f"priced with {software.name}, fitted to steps of one model on {' and '.join(software.fitted_on)}{spread}"
    elif spread:
        yield f"priced with {software.name}, never measured on a GPU{spread}"


def untested_device_warning(software: Software, cluster: Cluster) -> Iterator[str]:
    """Warning about software fitted only on other devices."""
    if software.fitted_on and cluster.device not in software.fitted_on:
        yield (
            f"{software.name} was fitted only to runs on {' and '.join(software.fitted_on)}: predictions for "
            f"{cluster.device} may be less accurate"
        )


def unmeasured_kernels_warning(cluster: Cluster) -> Iterator[str]:
    """Warning about unmeasured kernels, unless the cluster is calibrated."""
    if (source := cluster.device_type.priced_by) and cluster.calibration is None:
        yield (
            f"kernels of {cluster.device} were never measured: priced with {source}; measure them with shardyard "
            "calibrate --cluster"
        )


def extrapolated_exchange_warning(software: Software, cluster: Cluster, degrees: Degrees) -> Iterator[str]:
    """Warning about a fused dispatch beyond the measured range."""
    ranks = degrees.expert * degrees.expert_tensor
    nodes = min(ranks, -(-ranks // cluster.devices_per_node))
    if not software.is_fused or ranks == 1:
        return
    if (kernel := cluster.exchange) is None:
        yield f"{software.name} has a fused exchange that was never measured on {cluster.device}: priced as a plain one"
    elif nodes > kernel.most_nodes:
        coverage = "one node" if kernel.most_nodes == 1 else f"up to {kernel.most_nodes} nodes"
        yield (
            f"its fused exchange over {nodes} nodes is extrapolated: measurements on {cluster.device} cover {coverage}"
        )


def fewer_workers_warning(plan: Plan, alternative: Plan | None) -> Iterator[str]:
    """Warning about a faster plan on fewer workers."""
    if alternative is None or alternative.predicted.step_s >= plan.predicted.step_s:
        return
    step_s, fewer_s = plan.predicted.step_s, alternative.predicted.step_s
    yield (
        f"a step on {pluralize(alternative.num_workers, 'worker')} is predicted {describe_speed(fewer_s, step_s)}, "
        f"{format_seconds(fewer_s)}: here {format_seconds(communication_s(plan))} of {format_seconds(step_s)} are "
        "communication"
    )


def communication_s(plan: Plan) -> float:
    """Seconds of a step spent on communication between workers."""
    predicted = plan.predicted
    return predicted.all_to_all_s + predicted.gather_s + predicted.send_s + predicted.all_reduce_s


def divisible_s(plan: Plan) -> float:
    """Seconds of a step that halve with twice as many workers."""
    predicted = plan.predicted
    return predicted.products_s + predicted.attention_s + predicted.routing_s + predicted.elementwise_s
