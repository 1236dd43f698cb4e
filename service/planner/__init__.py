"""Planning of users' modules in a separate process, which imports them; this process never does."""
