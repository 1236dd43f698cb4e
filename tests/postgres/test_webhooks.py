"""Webhooks of two control planes on one PostgreSQL database."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from service.control.store.database import Database, WriteConflict
from service.control.store.webhooks import WebhookRow, insert_webhook, list_webhooks
from service.control.webhooks.addresses import AddressRule
from service.control.webhooks.sender import Sender
from service.control.webhooks.webhooks import Webhooks
from service.wire.webhooks import WebhookSpec


def test_a_row_that_another_has_stored_is_a_conflict_and_no_fault_of_the_database(url: str) -> None:
    with closing(Database(url)) as database:
        database.migrate()
        for number in range(2):
            row = WebhookRow(f"wh-{number}", "hook", "ana", "api", "https://example.org", "", "{}", 0)
            if number == 0:
                with database.write() as tx:
                    insert_webhook(tx, row)
            else:
                with pytest.raises(WriteConflict) as conflict, database.write() as tx:
                    insert_webhook(tx, row)
                assert conflict.value.status == 503
        assert database.fault is None


def test_control_planes_that_start_together_store_the_operators_webhooks_once(url: str) -> None:
    specs = [WebhookSpec(name=f"hook-{number}", url="https://example.org") for number in range(20)]
    start = threading.Barrier(2)

    def set_operators(database: Database) -> None:
        rule = AddressRule([])
        webhooks = Webhooks(database, Sender(rule, 1.0), rule)
        start.wait()
        webhooks.set_operators(specs, "ana")

    with closing(Database(url)) as first, closing(Database(url)) as second, ThreadPoolExecutor(2) as threads:
        first.migrate()
        list(threads.map(set_operators, (first, second)))
        with first.read() as tx:
            assert sorted(row.name for row in list_webhooks(tx)) == sorted(spec.name for spec in specs)
