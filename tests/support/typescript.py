"""`python -m support.typescript`: build the TypeScript client, if it is not built as it stands.

What is installed and what is built lie in its folder, each with a note of what it was made from.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from support import binaries
from support.binaries import Binary

FOLDER = Path(__file__).parents[2] / "clients" / "typescript"
MODULES = FOLDER / "node_modules"
DIST = FOLDER / "dist"


def built(node: Binary) -> Path:
    """The folder with the modules that browsers and Node load."""
    with (FOLDER / "package.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two tests may need it at once
        if _is_new(MODULES, named := ["package.json", "package-lock.json"]):
            _run(node, *binaries.npm(node), "ci", "--ignore-scripts")
            _note(MODULES, named)
        if _is_new(DIST, sources := ["package-lock.json", "tsconfig.json", *_sources()]):
            shutil.rmtree(DIST, ignore_errors=True)
            _run(node, node.path, MODULES / "typescript" / "bin" / "tsc")
            _note(DIST, sources)
    return DIST


def _sources() -> list[str]:
    return sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("src/*.ts"))


def _is_new(made: Path, sources: Iterable[str]) -> bool:
    note = made / ".semel"
    return not note.exists() or note.read_text() != _print_of(sources)


def _note(made: Path, sources: Iterable[str]) -> None:
    (made / ".semel").write_text(_print_of(sources))


def _print_of(sources: Iterable[str]) -> str:
    parts = [
        f"{name} {hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()}" for name in sources
    ]
    return "\n".join(parts)


def _run(node: Binary, *words: str | Path) -> None:
    done = subprocess.run(
        words,
        cwd=FOLDER,
        env=environment(node),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-2000:]
        raise RuntimeError(f"the TypeScript client was not built, {words[-1]} says:\n{said}")


def environment(node: Binary) -> dict[str, str]:
    """In which the programs it starts find this Node."""
    folders = [str(node.path.parent), os.environ.get("PATH", "")]
    return {**os.environ, "PATH": os.pathsep.join(folders), "npm_config_update_notifier": "false"}


if __name__ == "__main__":
    try:
        print(f"the TypeScript client is in {built(binaries.find('node'))}")
    except (binaries.Unavailable, RuntimeError) as error:
        sys.exit(str(error))
