"""Webhooks: what is sent where, and for which jobs."""

import base64
import binascii
import ipaddress
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, Field, SecretStr

from moe.spec.base import Spec, Text
from moe.spec.errors import RuleError
from service.wire.states import State

SECRET_PREFIX = "whsec_"
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 24, 64
"""Bounds of the Standard Webhooks specification."""
MAX_ENTRIES = 32
NUM_SHOWN_CHARS = 4
"""Last characters of a URL's path that are shown, to tell webhooks of one host apart."""
MIN_CHARS_TO_SHOW = 16
"""Length of a path from which they are shown: the rest of a shorter one could be guessed."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
NAME_RULE = "must have 1 to 63 letters, digits, '.', '_' and '-', starting and ending with a letter or digit"

EventType = Literal["job.state", "job.checkpoint"]


def split_url(url: str) -> SplitResult | None:
    """Parts of an http or https URL; None if it is none."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    is_text = url.isascii() and url.isprintable() and not any(character.isspace() for character in url)
    return parts if is_valid and is_text else None


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise RuleError("invalid_value", NAME_RULE, "rename it")
    return text


def _url(url: str) -> str:
    parts = split_url(url)
    if parts is None:
        raise RuleError("invalid_value", "must be an http or https URL in ASCII", "use https://HOST/PATH")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise RuleError("invalid_value", "must not contain credentials or '#'",
                        "verify the signature instead, or use a path that nobody can guess")  # fmt: skip
    return url


def _label(label: str) -> str:
    if not label.partition("=")[0]:
        raise RuleError("invalid_value", "must be key=value, or key for any value", "write the label's key")
    return label


def _secret(secret: SecretStr) -> SecretStr:
    if secret_key(secret.get_secret_value()) is None:
        raise RuleError(
            "invalid_value", f"must be {SECRET_PREFIX} and {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes in base64",
            "omit it to have one made",
        )  # fmt: skip
    return secret


def secret_key(secret: str) -> bytes | None:
    """Key of a secret; None if it is not one."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return None
    is_valid = secret.startswith(SECRET_PREFIX) and MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES
    return key if is_valid else None


WebhookName = Annotated[Text, AfterValidator(_name)]


class WebhookOptions(Spec):
    """Format of a webhook, and the events that it is sent."""

    format: Literal["json", "slack"] = "json"
    """`slack`: messages for Slack's incoming webhooks, and for what reads the same (Mattermost, Discord's `/slack`)."""
    events: tuple[EventType, ...] = Field(default=("job.state",), min_length=1, max_length=MAX_ENTRIES)
    states: tuple[State, ...] = Field(default=(), max_length=MAX_ENTRIES)
    """Only changes to one of these states. Default: every state."""
    labels: tuple[Annotated[Text, Field(max_length=127), AfterValidator(_label)], ...] = Field(
        default=(), max_length=MAX_ENTRIES
    )
    """Only jobs with all these labels: `key=value`, or `key` for any value."""
    jobs: Literal["all", "named"] = "all"
    """`named`: only jobs that name this webhook in `notify`."""
    enabled: bool = True
    """A disabled webhook gets tests, and what was queued before, but no further events."""

    def wants(self, event: EventType, state: State | None, labels: Mapping[str, str]) -> bool:
        """Whether an event of a job with these labels is sent; `jobs` apart."""
        if (
            not self.enabled
            or event not in self.events
            or (state is not None and self.states and state not in self.states)
        ):
            return False
        return all(_has_label(labels, label) for label in self.labels)


class WebhookSpec(WebhookOptions):
    """A webhook as it is posted or set by the operator."""

    name: WebhookName
    url: Annotated[Text, Field(max_length=2048), AfterValidator(_url)]
    secret: Annotated[SecretStr, AfterValidator(_secret)] | None = None
    """Key of the signatures, `whsec_` and base64. Default: a random one, which only the answer to the POST shows."""

    @property
    def options(self) -> WebhookOptions:
        return WebhookOptions(**{name: getattr(self, name) for name in WebhookOptions.model_fields})


def _has_label(labels: Mapping[str, str], label: str) -> bool:
    key, equals, value = label.partition("=")
    return key in labels and (not equals or labels[key] == value)


def named_webhooks(spec: Mapping[str, Any]) -> Collection[str]:
    """Names in `notify` of a stored spec, of any release."""
    names = spec.get("notify")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def literal_address(url: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Address that a URL names; None for a host's name."""
    parts = split_url(url)
    try:
        return ipaddress.ip_address((parts and parts.hostname) or "")
    except ValueError:
        return None


def shown_url(url: str) -> str:
    """Scheme and host of a URL, with the last characters of a long path and query, which may be a secret."""
    parts = split_url(url)
    if parts is None:
        return ""
    origin = f"{parts.scheme}://{parts.netloc}"
    location = f"{parts.path}?{parts.query}" if parts.query else parts.path
    if location in ("", "/"):
        return origin + location
    return f"{origin}/...{location[-NUM_SHOWN_CHARS:] if len(location) >= MIN_CHARS_TO_SHOW else ''}"


def filter_words(webhook: Mapping[str, Any]) -> str:
    """Events that a webhook of the API gets, and of which jobs: `job.state to failed, of jobs with team=research`."""
    states = f" to {' or '.join(webhook['states'])}" if webhook["states"] else ""
    events = " and ".join(f"{event}{states if event == 'job.state' else ''}" for event in webhook["events"])
    labels = f", of jobs with {' and '.join(webhook['labels'])}" if webhook["labels"] else ""
    return events + labels + (", of jobs that name it" if webhook["jobs"] == "named" else "")


def outcome_words(delivery: Mapping[str, Any]) -> str:
    """End of the last attempt of a delivery of the API."""
    attempt = delivery["last_attempt"]
    if attempt is None:
        return "not attempted yet"
    ending = attempt["error"] or f"answered {attempt['status']}"
    return f"{ending} in {attempt['duration_ms']:,} ms"
