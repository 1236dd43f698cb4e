"""Builds the launcher that the settings choose."""

from collections.abc import Callable

from service.control.kubernetes.api import KubernetesApi
from service.control.kubernetes.connection import Connection
from service.control.kubernetes.retry import RetryPolicy
from service.control.launcher.choice import LauncherChoice
from service.control.launcher.kuberay.launcher import KubeRayLauncher
from service.control.launcher.launcher import Launcher
from service.control.launcher.ray_jobs import RayJobsLauncher
from service.kuberay_settings import KubeRaySettings
from service.settings import Settings
from service.wire.trouble import Trouble


def build_launcher(settings: Settings, trouble: Callable[[], Trouble | None] = lambda: None) -> Launcher:
    """Launcher of a standing Ray cluster, of clusters of jobs' own, or of both, as the settings offer them.

    `trouble` returns the reason not to call the standing cluster now, if there is one. Raises Misconfigured if there is
    no way to reach Kubernetes."""
    own = None
    if offers_own(settings):
        own = KubeRayLauncher(open_api(settings.kuberay), settings.kuberay, cache=str(settings.cache_dir))
    shared = (
        RayJobsLauncher(settings.ray_dashboard_url, settings.driver_python, settings.ray_token_path, trouble)
        if offers_shared(settings)
        else None
    )
    if own is not None and shared is not None:
        return LauncherChoice(shared, own, default="own" if settings.launcher == "kuberay" else "shared")
    launcher = own or shared
    assert launcher is not None, "the default is always offered"
    return launcher


def offers_shared(settings: Settings) -> bool:
    """Whether jobs may run on a standing Ray cluster: by default, or because its address is set."""
    return settings.launcher == "ray_jobs" or "ray_dashboard_url" in settings.model_fields_set


def offers_own(settings: Settings) -> bool:
    """Whether jobs may have a Ray cluster of their own: by default, or because pools and image are set."""
    return settings.launcher == "kuberay" or bool(settings.kuberay.pools and settings.kuberay.image)


def open_api(settings: KubeRaySettings, *, timeout_s: float = 10.0, retry: RetryPolicy | None = None) -> KubernetesApi:
    """Client of the API server in the jobs' namespace; no request is made. Raises Misconfigured."""
    connection = Connection.open(settings.kubeconfig, settings.context or None)
    return KubernetesApi(connection, settings.namespace, timeout_s=timeout_s, retry=retry)
