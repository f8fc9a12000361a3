"""`python -m foretoken`: the command line, as launchers of several processes start it."""

from __future__ import annotations

from foretoken.cli import main

if __name__ == "__main__":
    main()
