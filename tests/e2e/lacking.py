"""A controller that believes what a file says of its host, rather than to find out itself."""

from __future__ import annotations

import os
from pathlib import Path

from netlimit.cli.main import app
from netlimit.kernel import capabilities

capabilities.FINDINGS = Path(os.environ["FINDINGS"])

if __name__ == "__main__":
    app()
