"""What people get: the source distribution, the wheel built from it, and that wheel on its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from support.wheel_files import missing_from

ROOT = Path(__file__).parents[2]
MADE = {"__pycache__", "node_modules", "dist"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CORE = next(
    contract["modules"]
    for contract in PROJECT["tool"]["importlinter"]["contracts"]
    if contract["id"] == "core"
)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Both distributions; the wheel is built from what the other one unpacks to."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="session")
def wheel(built):
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """The programs of an environment with the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "--python", folder / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    return folder / "bin"


def run(*words, code=0, **options):
    """What a command says; it knows nothing of this checkout."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SEMEL"))}
    done = subprocess.run(
        list(map(str, words)),
        capture_output=True,
        text=True,
        env=env,
        timeout=100,
        check=False,
        **options,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def packed(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_the_package_whole_and_nothing_else(wheel):
    names = packed(wheel)

    assert missing_from(wheel) == []
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"semel"}
    assert "semel/py.typed" in names
    assert "semel/stores/lua/claim.lua" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_needs_nothing_and_names_its_commands(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [n for n in archive.namelist() if n.endswith("METADATA")]
        said = archive.read(metadata).decode()
        (points,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        commands = archive.read(points).decode()

    needs = [line for line in said.splitlines() if line.startswith("Requires-Dist:")]
    assert needs
    assert all("extra ==" in line for line in needs)
    assert "semel = semel.cli:main" in commands
    assert "semel = semel.testing.plugin" in commands


def test_the_source_distribution_has_what_a_checkout_has(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}

    wanted = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    files = {
        str(path.relative_to(ROOT))
        for top in (ROOT / name.strip("/") for name in wanted)
        for path in ([top] if top.is_file() else top.rglob("*"))
        if path.is_file() and not MADE.intersection(path.parts)
    }
    assert files - names == set()
    assert {"Makefile", "LICENSE", "tests/conftest.py", ".ci/run"} <= names
    assert not [name for name in names if MADE.intersection(Path(name).parts)]
    assert not [name for name in names if name.startswith(".venv")]


def test_the_core_imports_alone_and_in_silence(installed, tmp_path):
    code = f"import {', '.join(CORE)}; print(semel.__file__)"
    said = run(installed / "python", "-I", "-W", "error", "-c", code, cwd=tmp_path)

    assert Path(said.strip()).is_relative_to(installed.parent)


def test_the_command_says_what_it_lacks(installed, tmp_path):
    said = run(installed / "semel", "--help", code=2, cwd=tmp_path)

    assert "pip install 'semel[cli]'" in said
    assert "Traceback" not in said


def test_the_readme_example_runs_from_the_wheel(installed, tmp_path):
    text = (ROOT / "README.md").read_text()
    example = text.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "shop.py").write_text(example)
    receipt = "{'order': 'o-7', 'paid': 40}\n"

    assert run(installed / "python", "shop.py", cwd=tmp_path) == "charging 40\n" + 2 * receipt
    assert run(installed / "python", "shop.py", cwd=tmp_path) == 2 * receipt
