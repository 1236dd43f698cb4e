"""Plans for people: in words, and as pictures."""
