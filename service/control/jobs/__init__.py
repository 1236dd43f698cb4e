"""Jobs between database and storage: state changes, the lease that permits them, and jobs' files on storage."""
