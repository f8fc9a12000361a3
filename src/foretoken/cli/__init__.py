"""The command line. Commands import what they need when they run: `--help` stays quick."""

from __future__ import annotations

from foretoken.cli.commands import app, main

__all__ = ["app", "main"]
