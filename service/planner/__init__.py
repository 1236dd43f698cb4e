"""Planning of users' modules in a process of its own, which imports them; this one never does."""
