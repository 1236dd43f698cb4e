"""`/v1/service`: setup of this control plane."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter

from service.control.api.services import ServicesDependency

router = APIRouter(prefix="/v1", tags=["service"])


@router.get("/service")
def get_service(services: ServicesDependency) -> dict[str, Any]:
    """Version of the service, and where state and jobs' files are kept."""
    settings = services.settings
    return {
        "version": version("shardyard"),
        "state_dir": str(settings.state_dir),
        "storage_roots": list(settings.storage_roots),
        "ray_dashboard_url": settings.ray_dashboard_url,
    }
