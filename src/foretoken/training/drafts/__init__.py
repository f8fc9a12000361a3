"""Draft models for a user's own target: shaped, trained, measured by the engine, written down."""
