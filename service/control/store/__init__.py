"""Store: tables, queries, migrations. Independent of HTTP and clusters."""
