"""The command line: `semel ledger ...` on any store, `semel db ...` for its tables.

It needs typer and rich, the extra `cli`; without them `main` says so. Whatever leaves here, an
answer or an error, leaves without passwords.
"""

from __future__ import annotations

import sys

__all__ = ["main"]

# Commands that need more than the command line: one extra brings it all.
_EXTRAS = {"gateway": "gateway", "rooms": "rooms"}


def main() -> None:
    """Run the command in `sys.argv` and exit with its code."""
    try:
        from semel.cli.app import invoke
    except ModuleNotFoundError as missing:
        library = (missing.name or "").partition(".")[0]
        if library not in ("typer", "rich"):
            raise
        sys.stderr.write(
            f"semel: the command line needs {library}, which is not installed; install it with: "
            f"pip install 'semel[{_EXTRAS.get(' '.join(sys.argv[1:2]), 'cli')}]'\n"
        )
        sys.exit(2)
    sys.exit(invoke(sys.argv[1:]))
