"""Planning of users' modules in a separate process, which imports them."""
