"""Messages for Slack's incoming webhooks."""

from typing import Any

MAX_REASON_CHARS = 500
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def slack_message(type: str, data: dict[str, Any]) -> dict[str, Any]:
    """Message about an event, as plain text: a job's name or reason formats nothing and mentions nobody."""
    return {"text": _text(type, data).translate(_ESCAPES), "mrkdwn": False}


def _text(type: str, data: dict[str, Any]) -> str:
    if type == "test":
        return f"Shardyard: a test of the webhook {data['webhook']}"
    job = data["job"]
    subject = f"{job['name']} ({job['id']})"
    if type == "job.checkpoint":
        return f"{subject} committed the checkpoint of step {data['checkpoint'].get('step')}"
    progress = f"step {job['step']:,} of {job['num_steps']:,}"
    if isinstance(loss := data.get("loss"), int | float):
        progress += f", loss {loss:.4g}"
    reason = str(data["reason"])[:MAX_REASON_CHARS]
    return f"{subject} is {data['state']} at {progress}" + (f": {reason}" if reason else "")
