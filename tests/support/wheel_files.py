"""`python tests/support/wheel_files.py WHEEL`: is every file of the package in the wheel?"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"


def missing_from(wheel: Path) -> list[str]:
    """The files under src/ that a user of this wheel would not get."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    sources = (path.relative_to(SRC).as_posix() for path in SRC.rglob("*") if path.is_file())
    return sorted(name for name in sources if "__pycache__" not in name and name not in packed)


def main() -> int:
    missing = missing_from(Path(sys.argv[1]))
    for name in missing:
        print(f"not in the wheel: {name}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
