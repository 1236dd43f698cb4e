"""Check of the Kubernetes cluster before the control plane serves."""

import sys
from contextlib import closing
from typing import TYPE_CHECKING

from service.cli.failures import Misuse

if TYPE_CHECKING:
    from service.settings import Settings


def require_kubernetes(settings: "Settings") -> None:
    """Check that jobs can have Ray clusters of their own, if the settings offer that. Raises Misuse; an API server that
    does not answer is only a warning, as it may later."""
    from service.control.kubernetes.errors import Misconfigured, Unavailable
    from service.control.launcher.build import offers_own, open_api
    from service.control.launcher.kuberay.preflight import check_cluster

    if not offers_own(settings):
        return
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
