"""The Python client: `Client(url).submit(spec) -> Job`; `job.events()`, `job.wait()`, `job.metrics()`."""

from service.client.client import Client
from service.client.errors import ApiError, BadUrl, ClientError, NotShardyard, Unreachable
from service.client.job import Job
from service.client.stream import Patience
from service.client.sweep import Sweep

__all__ = ["ApiError", "BadUrl", "Client", "ClientError", "Job", "NotShardyard", "Patience", "Sweep", "Unreachable"]
