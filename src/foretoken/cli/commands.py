"""Every command of the house together: importing a command's module makes it join the group."""

from __future__ import annotations

from foretoken.cli import catalogue as catalogue
from foretoken.cli import chat as chat
from foretoken.cli import datastore as datastore
from foretoken.cli import evaluation as evaluation
from foretoken.cli import heads as heads
from foretoken.cli import load as load
from foretoken.cli import measure as measure
from foretoken.cli import minis as minis
from foretoken.cli import plan as plan
from foretoken.cli import serve as serve
from foretoken.cli import train as train
from foretoken.cli import tune as tune
from foretoken.cli import vocabulary as vocabulary
from foretoken.cli import write as write
from foretoken.cli.app import app
from foretoken.cli.logs import add_flags

add_flags(app)


def main() -> None:
    """Entry point of the `foretoken` script."""
    app()
