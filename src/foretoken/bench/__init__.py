"""Comparing methods and peers on the same prompts, with one token counter for everybody."""
