"""What two processes say to each other: launches, records, events, states. Knows nobody who says it."""
