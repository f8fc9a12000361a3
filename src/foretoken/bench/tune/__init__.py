"""The fastest configuration for a target and some prompts, found within a time limit."""
