"""Store: tables, queries, migrations. Knows nothing of HTTP, of clusters, or of what a state means."""
