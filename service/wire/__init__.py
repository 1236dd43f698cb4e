"""Messages between processes: launches, records, events, states. Imports no sender or receiver."""
