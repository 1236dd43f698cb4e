"""Store: tables, queries, migrations. Independent of HTTP, clusters and the meaning of states."""
