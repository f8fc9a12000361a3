"""Drafts that learn while they serve: what was rejected, learning from it, and a replay of it."""
