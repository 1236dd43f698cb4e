"""Messages between two processes: launches, records, events, states. Knows nobody who sends them."""
