"""Metrics of the control plane for Prometheus."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from service.control.report.saves import Saves

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass(frozen=True)
class ActiveJob:
    """Progress of a job that the cluster may run."""

    step: int
    num_steps: int
    saves: Saves
    is_evaluating: bool = False
    is_queued: bool = False
    """Whether it waits in the cluster's own queue."""


class Figures:
    """Metrics of one app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "shardyard_http_requests", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self.request_seconds = Histogram(
            "shardyard_http_request_seconds",
            "Time to the first byte of a response.",
            ["method", "route"],
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.records = Counter("shardyard_records", "Stored records of runs.", ["kind"], registry=self.registry)
        self.streams = Gauge("shardyard_event_streams", "Open event streams.", registry=self.registry)
        self.acting = Gauge(
            "shardyard_controller_acting", "1 while this control plane holds the lease.", registry=self.registry
        )
        self.cluster_answers = Gauge(
            "shardyard_cluster_answers", "1 while the cluster responds to the controller.", registry=self.registry
        )

    def watch_jobs(self, count: Callable[[], Mapping[str, int]]) -> None:
        """Add the number of jobs in each state, counted at each scrape."""
        self.registry.register(_Jobs(count))

    def watch_queue(self, oldest_s: Callable[[], float | None]) -> None:
        """Add the Unix time since which the first job of the queue waits; None without any."""
        self.registry.register(_Queue(oldest_s))

    def watch_active(self, active: Callable[[], Mapping[str, ActiveJob]]) -> None:
        """Add steps and checkpoints of each active job, by id."""
        self.registry.register(_ActiveJobs(active))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Jobs(Collector):
    def __init__(self, count: Callable[[], Mapping[str, int]]) -> None:
        self._count = count

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily("shardyard_jobs", "Stored jobs by state.", labels=["state"])
        for state, jobs in self._count().items():
            family.add_metric([state], jobs)
        yield family

    def describe(self) -> Iterator[GaugeMetricFamily]:
        # Without `describe`, registering collects, and the store is not open yet.
        yield GaugeMetricFamily("shardyard_jobs", "Stored jobs by state.", labels=["state"])


class _Queue(Collector):
    def __init__(self, oldest_s: Callable[[], float | None]) -> None:
        self._oldest_s = oldest_s

    def collect(self) -> Iterator[GaugeMetricFamily]:
        (family,) = self.describe()
        if (oldest_s := self._oldest_s()) is not None:
            family.add_metric([], oldest_s)
        yield family

    def describe(self) -> tuple[GaugeMetricFamily]:
        name = "shardyard_queue_oldest_timestamp_seconds"
        return (GaugeMetricFamily(name, "Time at which the job that waits longest was queued.", labels=[]),)


class _ActiveJobs(Collector):
    """Metrics of active jobs only, to bound the labels."""

    def __init__(self, active: Callable[[], Mapping[str, ActiveJob]]) -> None:
        self._active = active

    def collect(self) -> Iterator[GaugeMetricFamily]:
        step, num_steps, evaluating, queued, committed, failed = self.describe()
        for job_id, job in self._active().items():
            saves = job.saves
            step.add_metric([job_id], job.step)
            num_steps.add_metric([job_id], job.num_steps)
            evaluating.add_metric([job_id], job.is_evaluating)
            queued.add_metric([job_id], job.is_queued)
            if saves.committed is not None:
                committed.add_metric([job_id], saves.committed.time.timestamp())
            failed.add_metric([job_id], saves.failed.num_failed if saves.failed and saves.failing else 0)
        yield from (step, num_steps, evaluating, queued, committed, failed)

    def describe(self) -> tuple[GaugeMetricFamily, ...]:
        documentation_by_name = {
            "shardyard_job_step": "Last recorded step of an active job.",
            "shardyard_job_num_steps": "Steps of an active job's spec.",
            "shardyard_job_evaluating": "1 while an active job's ranks evaluate, and record no step.",
            "shardyard_job_queued": "1 while an active job waits in the cluster's own queue (Kueue's).",
            "shardyard_job_last_checkpoint_timestamp_seconds": "Time of a running job's last committed checkpoint.",
            "shardyard_job_failed_checkpoints": "Failed checkpoints of a running job since its last committed one.",
        }
        return tuple(GaugeMetricFamily(name, text, labels=["job"]) for name, text in documentation_by_name.items())
