"""Runs migrations on the connection that `Database.migrate` hands over, each in a transaction of its own."""

from alembic import context

from service.control.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transaction_per_migration=True,
    render_as_batch=True,  # SQLite alters a table by copying it
)
with context.begin_transaction():
    context.run_migrations()
