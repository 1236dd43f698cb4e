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
    from service.control.launcher.kuberay.preflight import find_problems

    if not offers_own(settings):
        return
    try:
        with closing(open_api(settings.kuberay)) as api:
            problems = find_problems(api, settings.kuberay)
    except Misconfigured as error:
        raise Misuse(str(error)) from None
    except Unavailable as error:
        print(f"Kubernetes is not checked: {error}; jobs wait until it answers", file=sys.stderr, flush=True)
        return
    if problems:
        raise Misuse("\n".join(problems))
