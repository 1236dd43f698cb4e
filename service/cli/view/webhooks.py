"""Listings of webhooks and their deliveries."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from service.cli.view.amounts import moment
from service.cli.view.listing import Column
from service.cli.view.printable import printable
from service.wire.webhooks import filter_words, outcome_words

MIN_URL, MIN_OUTCOME = 20, 16
_STYLES = {"delivered": "bold green", "failed": "bold red", "pending": "bold yellow"}


def webhook_columns(webhooks: Sequence[dict[str, Any]]) -> list[Column]:
    """Columns of `webhooks ls`."""
    return [
        Column("WEBHOOK", [Text(webhook["id"]) for webhook in webhooks], can_shrink=4),
        Column("NAME", [Text(printable(webhook["name"])) for webhook in webhooks]),
        Column("FORMAT", [Text(webhook["format"]) for webhook in webhooks], can_shrink=3),
        Column("GETS", [Text(printable(_filter(webhook))) for webhook in webhooks], can_shrink=2, min_width=MIN_URL),
        Column("URL", [Text(printable(webhook["url"])) for webhook in webhooks], can_shrink=1, min_width=MIN_URL),
    ]


def delivery_columns(deliveries: Sequence[dict[str, Any]]) -> list[Column]:
    """Columns of `webhooks deliveries`. Ids are never cut."""
    return [
        Column("DELIVERY", [Text(delivery["id"]) for delivery in deliveries]),
        Column("TYPE", [Text(delivery["type"]) for delivery in deliveries], can_shrink=3),
        Column("JOB", [Text(delivery["job_id"] or "-") for delivery in deliveries], can_shrink=2),
        Column("STATE", [Text(delivery["state"], _STYLES.get(delivery["state"], "")) for delivery in deliveries]),
        Column("CREATED", [Text(moment(delivery["created_at"])) for delivery in deliveries], can_shrink=4),
        Column("TRIES", [Text(f"{delivery['attempts']}") for delivery in deliveries], can_shrink=5, right=True),
        Column(
            "OUTCOME", [Text(outcome(delivery), "dim") for delivery in deliveries], can_shrink=1, min_width=MIN_OUTCOME
        ),
    ]


def outcome(delivery: dict[str, Any]) -> str:
    """How the last attempt ended, in words."""
    return printable(outcome_words(delivery))


def _filter(webhook: dict[str, Any]) -> str:
    """Events that a webhook gets: none while it is disabled."""
    return ("" if webhook.get("enabled", True) else "nothing, disabled: ") + filter_words(webhook)
