"""Jobs between database and storage: state changes, the lease, and files on storage."""
