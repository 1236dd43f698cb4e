"""Jobs on a Ray cluster, queried through its dashboard."""

from pathlib import Path

FINISHED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
TIMEOUT_S = 30.0


def unfinished_jobs(dashboard_url: str, token_path: Path | None) -> list[str] | None:
    """Submission ids of unfinished jobs; None if the cluster does not respond."""
    import httpx

    try:
        headers = {"authorization": f"Bearer {token_path.read_text().strip()}"} if token_path else {}
        answer = httpx.get(f"{dashboard_url}/api/jobs/", headers=headers, timeout=TIMEOUT_S, trust_env=False)
        answer.raise_for_status()
        return [
            str(job["submission_id"])
            for job in answer.json()
            if job.get("submission_id") and job["status"] not in FINISHED
        ]
    except (httpx.HTTPError, ValueError, OSError):  # OSError: the head's token file was removed
        return None
