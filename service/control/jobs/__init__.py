"""Jobs between database and storage: changes of state, the lease to make them, and what storage has of a job."""
