"""A command that tells which modules it loads once a file is there: `python -m tests.cli.importing FILE …`."""

from __future__ import annotations

import os
import sys

AT = sys.argv[1]


def tell(event: str, arguments: tuple[object, ...]) -> None:
    """Tell of modules that are looked for, and of those that are read though nobody asks by name."""
    loads = event == "import" or (event == "open" and str(arguments[0]).endswith((".py", ".pyc")))
    if loads and os.path.exists(AT):
        sys.stderr.write(f"LOADED LATE {arguments[0]}\n")


if __name__ == "__main__":
    from netlimit.cli.main import app

    sys.addaudithook(tell)
    app(sys.argv[2:])
