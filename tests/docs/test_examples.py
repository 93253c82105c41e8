"""Examples that cannot start say why in one sentence; what they print can be read."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.process import HOST, free_port

ROOT = Path(__file__).parents[2]


def run(*words, folder=ROOT):
    env = {k: v for k, v in os.environ.items() if k not in {"ORDERS_URL", "BANK_URL", "MAKEFLAGS"}}
    return subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def orders_api(*options, folder):
    return run(sys.executable, str(ROOT / "examples" / "orders_api"), *options, folder=folder)


@pytest.mark.parametrize("name", ["charge_once", "no_such"])
def test_an_example_that_is_not_there_is_answered_with_those_that_are(name):
    done = run("make", "example", f"NAME={name}")
    assert done.returncode != 0
    there = "case_outbox orders_api poker_table scan_pipeline"
    assert f"no example '{name}'; there is: {there}." in done.stderr
    assert "Traceback" not in done.stderr


def test_help_keeps_its_lines(tmp_path):
    said = orders_api("--help", folder=tmp_path).stdout.splitlines()
    assert any(line.endswith("when 8000 is taken") for line in said)
    assert any(line.endswith("watch it being retried and killed") for line in said)


def test_a_port_that_is_taken_is_said_with_what_to_write(tmp_path):
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        done = orders_api("--port", str(port), folder=tmp_path)
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert f"port {port} is not free" in line
    assert "--port" in line


def test_commands_that_the_orders_api_prints_exist(tmp_path):
    """The example runs in an environment that is not on the PATH of the user's shell."""
    env = {k: v for k, v in os.environ.items() if k not in {"ORDERS_URL", "BANK_URL"}}
    words = [sys.executable, str(ROOT / "examples" / "orders_api"), "--port", str(free_port())]
    with subprocess.Popen(
        words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        lines = iter(server.stderr.readline, "")
        assert any("startup complete" in line for line in lines)
        server.terminate()
        said = server.communicate(timeout=60)[0]
    [hint] = [line for line in said.splitlines() if "ledger list" in line]
    done = subprocess.run(
        ["/bin/sh", "-c", hint],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"postgresql://ann:secret@{HOST}:{free_port()}/shop", "cannot be reached"),
        ("mysql://ann:secret@db/shop", "SQLite and PostgreSQL"),
        ("shop", "no URL of a database"),
    ],
    ids=["nobody answers", "another kind", "no URL"],
)
def test_a_database_that_cannot_be_had_is_said_in_a_line(url, words, tmp_path):
    done = orders_api("--url", url, folder=tmp_path)
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert words in line
    assert "secret" not in line


def test_a_receipt_and_its_newline_are_one_write(tmp_path):
    """Two clicks share a terminal: what is written in two parts is mixed up."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a message per write
    env = {**os.environ, "SHOP_FOLDER": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    shop = ROOT / "examples" / "charge_once" / "shop.py"
    words = [sys.executable, str(shop), "hopefully", "order-1"]
    with ours, theirs:
        subprocess.run(words, stdout=theirs, env=env, check=True, timeout=60)
        line = ours.recv(1000)
    assert line.startswith(b"      process ")
    assert line.endswith(b"\n")
