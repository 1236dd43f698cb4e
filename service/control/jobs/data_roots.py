"""Folders that a job's data may come from: the operator's, and that of uploads if the job names one."""

from dataclasses import dataclass

from moe.spec import JobSpec


@dataclass(frozen=True)
class DataRoots:
    configured: tuple[str, ...]
    uploads_url: str
    """Folder of uploads' folders."""

    def of(self, spec: JobSpec) -> tuple[str, ...]:
        """Roots of a job's data."""
        return self.of_text(spec.model_dump_json())

    def of_text(self, text: str) -> tuple[str, ...]:
        """Roots of a job by the text of its spec."""
        names_upload = bool(self.uploads_url) and f"{self.uploads_url}/" in text
        return (*self.configured, self.uploads_url) if names_upload else self.configured
