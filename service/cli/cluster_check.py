"""Checks of the Kubernetes cluster: before the control plane serves, and for `doctor`."""

import sys
from contextlib import closing
from typing import TYPE_CHECKING

from service.cli.checks import PATIENCE_S, Finding
from service.cli.failures import Misuse

if TYPE_CHECKING:
    from service.settings import Settings


TOPIC = "Kubernetes"


def require_kubernetes(settings: "Settings") -> None:
    """Check that jobs can have Ray clusters of their own, if the settings offer that. Raises Misuse; an API server that
    does not answer is only a warning, as it may later."""
    from service.control.kubernetes.errors import Misconfigured, Unavailable
    from service.control.launcher.build import offers_own, open_api
    from service.control.launcher.kuberay.preflight import check_cluster

    if not offers_own(settings):
        return
    if faults := _storage_faults(settings):
        raise Misuse("\n".join(faults))
    try:
        with closing(open_api(settings.kuberay)) as api:
            report = check_cluster(api, settings.kuberay, str(settings.cache_dir))
    except Misconfigured as error:
        raise Misuse(str(error)) from None
    except Unavailable as error:
        print(f"Kubernetes is not checked: {error}; jobs wait until it answers", file=sys.stderr, flush=True)
        return
    for note in report.notes:
        print(f"Kubernetes: {note}", file=sys.stderr, flush=True)
    if report.faults:
        raise Misuse("\n".join(report.faults))


def check_kubernetes(settings: "Settings") -> list[Finding]:
    """Findings about the Kubernetes cluster; none if jobs do not run there."""
    from service.control.kubernetes.errors import Misconfigured, Unavailable
    from service.control.kubernetes.retry import RetryPolicy
    from service.control.launcher.build import offers_own, open_api
    from service.control.launcher.kuberay.preflight import check_cluster
    from service.control.launcher.kuberay.warm_nodes import cost_of_warm_nodes

    if not offers_own(settings):
        return []
    kuberay = settings.kuberay
    findings = [Finding(TOPIC, "fault", fault) for fault in _storage_faults(settings)]
    try:
        with closing(open_api(kuberay, timeout_s=PATIENCE_S / 2, retry=RetryPolicy(attempts=1))) as api:
            report = check_cluster(api, kuberay, str(settings.cache_dir))
            namespace = api.namespace
    except Misconfigured as error:
        return [*findings, Finding(TOPIC, "fault", str(error))]
    except Unavailable as error:
        return [*findings, Finding(TOPIC, "note", f"{error}; jobs wait until it answers")]
    findings += [Finding(TOPIC, "fault", fault) for fault in report.faults]
    findings += [Finding(TOPIC, "note", note) for note in report.notes]
    if not any(finding.verdict == "fault" for finding in findings):
        nodes = ", ".join(f"{pool.nodes} x {pool.name}" for pool in kuberay.job_pools)
        findings.append(Finding(TOPIC, "ok", f"RayJobs run in namespace {namespace} on {nodes}"))
    if kuberay.warm_nodes:
        findings.append(Finding("warm nodes", "note", cost_of_warm_nodes(kuberay)))
    return findings


def _storage_faults(settings: "Settings") -> tuple[str, ...]:
    """Faults of storage roots that pods of jobs' own clusters cannot see. Raises Misuse for malformed ones."""
    from service.control.jobs.roots import StorageRoots
    from service.control.launcher.kuberay.preflight import check_storage

    try:
        places = StorageRoots(settings.storage_roots).locations()
    except ValueError as error:
        raise Misuse(str(error)) from None
    return check_storage(places, settings.kuberay)
