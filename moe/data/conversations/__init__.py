"""Conversations: records → messages → a chat template → text, and the stretches of it that are learned. No torch."""
