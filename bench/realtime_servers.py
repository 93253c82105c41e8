"""Who is measured: servers in processes of their own, how one publishes there, and who is missing.

Nothing is installed. nginx and nchan are Debian's packages, unpacked as the tests unpack servers;
Socket.IO is fetched by npm, at the versions in socketio/package-lock.json.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Self

from bench.machine import ROOT, cpu_s, version
from bench.realtime_app import STAGES
from bench.realtime_crowd import HOST, Seat
from semel.bus import BlockingPublisher
from support import binaries, provision
from support.binaries import Binary
from support.process import ServerProcess, family, free_port, new_folder

PATIENCE_S = 30.0
ACCEPTED = 300  # what a message was taken with is below

SOCKET_IO = ROOT / "bench" / "socketio"
SOCKET_IO_PATH = "/socket.io/?EIO=4&transport=websocket"
NGINX_HOME = Path("/var/lib/nginx")
NCHAN = Path("usr/lib/nginx/modules/ngx_nchan_module.so")

JOB = "job-1"

SIZE = 120


class Missing(Exception):  # noqa: N818 - a situation, and a row of the table
    """There is no way to run this one here. The message says what to do about it."""


def message(stamp: int) -> str:
    """About 120 bytes, with the moment it is sent at."""
    said = f'{{"sent":"@{stamp}@","note":"'
    return said + "a" * (SIZE - len(said) - 2) + '"}'


def message_data(stamp: int) -> dict[str, str]:
    found: dict[str, str] = json.loads(message(stamp))
    return found


Publish = Callable[[str], None]
"""Says something to everybody who listens."""

Place = AbstractContextManager[tuple[Seat, Publish]]
"""Where one listens, and how one publishes to those who do."""


@contextlib.contextmanager
def posting(seat: Seat, path: str) -> Iterator[tuple[Seat, Publish]]:
    """Over HTTP, on one connection; a request is one write."""
    with socket.create_connection((HOST, seat.port), timeout=PATIENCE_S) as line:

        def publish(message: str) -> None:
            head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(message)}"
            line.sendall(f"{head}\r\n\r\n{message}".encode())
            answer = HTTPResponse(line)
            answer.begin()
            answer.read()
            if answer.status >= ACCEPTED:
                raise RuntimeError(f"a message was answered {answer.status}")

        yield seat, publish


class Listening(ServerProcess):
    """A server that is ready when its port is."""

    def probe(self) -> None:
        socket.create_connection((HOST, self.port), timeout=5).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def cpu_s(self) -> float:
        """Processor time of all its processes; nothing where the system does not tell."""
        return sum(cpu_s(pid) or 0.0 for pid in family(self.pid))


@dataclass
class Running:
    """A server that was started. `place` is a new one each time: nobody hears of earlier turns."""

    server: Listening
    place: Callable[[], Place]

    def stop(self) -> None:
        self.server.stop()


@dataclass(frozen=True)
class Entrant:
    """Somebody to be measured. `start` takes the URL of a Redis."""

    name: str
    role: str
    start: Callable[[str], Running]
    note: str = ""


# --- Python: ours, the floor and sse-starlette --------------------------------------------------


def python(*words: str, port: int) -> Listening:
    binary = Binary("python", Path(sys.executable), "path")
    return Listening(binary, list(words), port, new_folder("realtime")).start()


def app(kind: str, *words: str) -> Listening:
    port = free_port()
    return python("-m", "bench.realtime_app", kind, str(port), *words, port=port)


def _app(kind: str, _redis: str) -> Running:
    server = app(kind)
    return Running(server, partial(posting, Seat(server.port, f"/jobs/{JOB}"), "/publish"))


def gateway(redis: str, *words: str) -> Listening:
    """`semel gateway`, as people start it."""
    port = free_port()
    said = ("-m", "semel", "gateway", redis, "--port", str(port), "--base", "/jobs", *words)
    return python(*said, port=port)


def new_job() -> str:
    return f"job-{secrets.token_hex(6)}"


@contextlib.contextmanager
def publishing(redis: str, port: int) -> Iterator[tuple[Seat, Publish]]:
    """To a job of its own, as a worker does it."""
    job_id, numbers = new_job(), itertools.count(STAGES.next_seq("vision"))
    with BlockingPublisher(redis, stages=STAGES) as publisher:

        def publish(message: str) -> None:
            publisher.publish(job_id, "vision", next(numbers), json.loads(message))

        publish(message(0))  # a job that nobody has heard of cannot be watched
        yield Seat(port, f"/jobs/{job_id}"), publish


def _semel_on_redis(redis: str) -> Running:
    server = gateway(redis)
    return Running(server, partial(publishing, redis, server.port))


def _semel_embedded(store: str, _redis: str) -> Running:
    """An app that publishes and shows, in one process."""
    server = app("semel", store)
    port = server.port

    @contextlib.contextmanager
    def place() -> Iterator[tuple[Seat, Publish]]:
        job_id = new_job()
        with posting(Seat(port, f"/jobs/{job_id}"), f"/publish/{job_id}") as (seat, publish):
            publish(message(0))
            yield seat, publish

    return Running(server, place)


# --- nchan --------------------------------------------------------------------------------------

NGINX_CONF = """
load_module {module};
daemon off;
master_process on;
{user}
worker_processes auto;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 16384; }}
worker_rlimit_nofile {files};
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location ~ ^/jobs/(.+)$ {{
            nchan_subscriber eventsource;
            nchan_channel_id $1;
            nchan_subscriber_first_message newest;
        }}
        location ~ ^/publish/(.+)$ {{
            nchan_publisher http;
            nchan_channel_id $1;
            nchan_message_buffer_length 1000;
            nchan_message_timeout 1h;
        }}
    }}
}}
"""


class Nginx(Listening):
    """A master and its workers: it writes its log itself."""

    def log_tail(self, size: int = 2000) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / "error.log").read_bytes()[-size:].decode(errors="replace")
        return super().log_tail(size)


@cache
def nginx() -> tuple[Binary, Path]:
    """The program, and the module with nchan."""
    found = _nginx()
    if found is None and shutil.which("apt-get") and shutil.which("dpkg-deb"):
        with contextlib.suppress(subprocess.CalledProcessError):
            provision.unpack(["nginx", "libnginx-mod-nchan"])
        found = _nginx()
    if found is None:
        raise Missing("nchan is not here. To get it: apt install nginx libnginx-mod-nchan")
    return found


def _nginx() -> tuple[Binary, Path] | None:
    on_path = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    for root, program, source in (
        (Path("/"), on_path, "path"),
        (binaries.DEB_ROOT, binaries.DEB_ROOT / "usr/sbin/nginx", "deb"),
    ):
        if program and Path(program).exists() and (root / NCHAN).exists():
            return Binary("nginx", Path(program), source), root / NCHAN
    return None


def _nchan(_redis: str) -> Running:
    binary, module = nginx()
    _make_room()
    port, folder = free_port(), new_folder("nchan")
    settings = NGINX_CONF.format(
        module=module,
        folder=folder,
        port=port,
        files=most_files(),
        user="user root;" if os.geteuid() == 0 else "",  # its folder is ours
    )
    (folder / "nginx.conf").write_text(settings)
    words = ["-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    server = Nginx(binary, words, port, folder).start()
    return Running(server, partial(posting, Seat(port, f"/jobs/{JOB}"), f"/publish/{JOB}"))


def _make_room() -> None:
    """The module wants the folder that nginx was built with, whatever its configuration says."""
    try:
        NGINX_HOME.mkdir(parents=True, exist_ok=True)
    except PermissionError:
        raise Missing(f"nchan wants a folder {NGINX_HOME}: install nginx, or make it") from None


def most_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


# --- Node ---------------------------------------------------------------------------------------


@cache
def npm_folder(source: Path) -> Path:
    """A server with what it needs, fetched once for each set of versions."""
    if not shutil.which("node") or not shutil.which("npm"):
        raise Missing(f"{source.name} needs node and npm. To get them: apt install nodejs npm")
    lock = (source / "package-lock.json").read_bytes()
    folder = binaries.CACHE / "npm" / f"{source.name}-{hashlib.sha256(lock).hexdigest()[:12]}"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    if not (folder / "fetched").exists():
        words = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Missing(f"npm could not fetch {source.name}: {done.stderr.strip()[-300:]}")
        (folder / "fetched").touch()
    return folder


def node(source: Path, script: str, *words: str, port: int) -> Listening:
    binary = Binary("node", Path(shutil.which("node") or "node"), "path")
    said = [str(npm_folder(source) / script), *words]
    return Listening(binary, said, port, new_folder(source.name)).start()


def _socket_io(redis: str) -> Running:
    port = free_port()
    server = node(SOCKET_IO, "server.mjs", redis, str(port), port=port)
    return Running(server, partial(posting, Seat(port, SOCKET_IO_PATH, "socket.io"), "/publish"))


FLOOR = Entrant("asyncio, the same bytes to every socket", "floor", partial(_app, "floor"))
SSE_STARLETTE = Entrant(
    "sse-starlette",
    "peer",
    partial(_app, "sse-starlette"),
    "a queue for each client, in memory; no resume",
)
NCHAN_ENTRANT = Entrant("nginx + nchan", "peer", _nchan, "a worker for each core; in memory")
SOCKET_IO_ENTRANT = Entrant(
    "Socket.IO", "peer", _socket_io, "WebSocket, redis-streams-adapter, recovery switched on"
)

OURS = (
    Entrant("semel gateway, Redis", "us", _semel_on_redis),
    Entrant("semel, in memory", "us", partial(_semel_embedded, "memory://"), "in one process"),
)
PEERS = (SSE_STARLETTE, NCHAN_ENTRANT, SOCKET_IO_ENTRANT)


def versions() -> str:
    found = [f"{name} {version(name)}" for name in ("sse-starlette", "uvicorn", "uvloop")]
    found += node_versions(SOCKET_IO)
    with contextlib.suppress(Missing):
        found += [_said(str(nginx()[0].path), "-v", env=nginx()[0].environment())]
    found += [f"{binary}" for binary in binaries.candidates("chromium")[:1]]
    return f"- realtime: {', '.join(filter(None, found))}"


def node_versions(*sources: Path) -> list[str]:
    found: list[str] = []
    for source in sources:
        needs = json.loads((source / "package.json").read_text())["dependencies"]
        found += [f"{name} {number}" for name, number in needs.items()]
    return [*found, _said("node", "--version")]


def _said(*words: str, env: dict[str, str] | None = None) -> str:
    if not shutil.which(words[0]):
        return ""
    told = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    number = re.search(r"\d+(?:\.\d+)+", told.stdout + told.stderr)
    return f"{Path(words[0]).name} {number.group() if number else 'of unknown version'}"
