"""Conversations: records → messages → a chat template → text with the spans to learn. No torch."""
