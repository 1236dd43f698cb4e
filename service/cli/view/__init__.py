"""Terminal views: jobs, progress, reports, plans."""
