"""The page about the command line, which says what its answers have."""

from __future__ import annotations

import re
from pathlib import Path

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def documented_fields(heading: str) -> list[str]:
    """The fields in the table below a heading, in their order."""
    text = REFERENCE.read_text().partition(f"### {heading}\n")[2].partition("\n##")[0]
    return re.findall(r"^\| `([\w{}]+)` \|", text, re.MULTILINE)
