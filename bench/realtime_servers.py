"""Who is measured: servers in processes of their own, how one publishes there, and who is missing.

Nothing is installed. nginx and nchan are Debian's packages, unpacked as the tests unpack servers;
Socket.IO is fetched by npm, at the versions in socketio/package-lock.json.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
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

from bench.machine import ROOT
from bench.realtime_crowd import HOST, Seat
from support import binaries, provision
from support.binaries import Binary
from support.process import ServerProcess, family, free_port, new_folder

PATIENCE_S = 30.0
ACCEPTED = 300  # what a message was taken with is below

SOCKET_IO = ROOT / "bench" / "socketio"
NGINX_HOME = Path("/var/lib/nginx")
NCHAN = Path("usr/lib/nginx/modules/ngx_nchan_module.so")

JOB = "job-1"


class Missing(Exception):  # noqa: N818 - a situation, and a row of the table
    """There is no way to run this one here. The message says what to do about it."""


Publish = Callable[[str], None]
"""Says something to everybody who listens."""


@contextlib.contextmanager
def post(port: int, path: str) -> Iterator[Publish]:
    """Over HTTP, on one connection; a request is one write."""
    with socket.create_connection((HOST, port), timeout=PATIENCE_S) as line:

        def publish(message: str) -> None:
            head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(message)}"
            line.sendall(f"{head}\r\n\r\n{message}".encode())
            answer = HTTPResponse(line)
            answer.begin()
            answer.read()
            if answer.status >= ACCEPTED:
                raise RuntimeError(f"a message was answered {answer.status}")

        yield publish


class Listening(ServerProcess):
    """A server that is ready when its port is."""

    def probe(self) -> None:
        socket.create_connection((HOST, self.port), timeout=5).close()

    @property
    def pids(self) -> list[int]:
        return family(self.pid)


@dataclass
class Running:
    """A server that was started: where one sits down, and how one publishes."""

    server: Listening
    seat: Seat
    publisher: Callable[[], AbstractContextManager[Publish]]

    def stop(self) -> None:
        self.server.stop()


@dataclass(frozen=True)
class Entrant:
    """Somebody to be measured. `start` takes the URL of a Redis."""

    name: str
    role: str
    start: Callable[[str], Running]
    note: str = ""


# --- ours, and the floor ------------------------------------------------------------------------


def python(*words: str, port: int) -> Listening:
    binary = Binary("python", Path(sys.executable), "path")
    return Listening(binary, list(words), port, new_folder("realtime")).start()


def _app(kind: str, _redis: str) -> Running:
    port = free_port()
    server = python("-m", "bench.realtime_app", kind, str(port), port=port)
    return Running(server, Seat(port, f"/jobs/{JOB}"), partial(post, port, "/publish"))


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
    return Running(server, Seat(port, f"/jobs/{JOB}"), partial(post, port, f"/publish/{JOB}"))


def _make_room() -> None:
    """The module wants the folder that nginx was built with, whatever its configuration says."""
    try:
        NGINX_HOME.mkdir(parents=True, exist_ok=True)
    except PermissionError:
        raise Missing(f"nchan wants a folder {NGINX_HOME}: install nginx, or make it") from None


def most_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


# --- Socket.IO ----------------------------------------------------------------------------------


@cache
def socket_io_folder() -> Path:
    """The server with what it needs, fetched once for each set of versions."""
    if not shutil.which("node") or not shutil.which("npm"):
        raise Missing("Socket.IO needs node and npm. To get them: apt install nodejs npm")
    lock = (SOCKET_IO / "package-lock.json").read_bytes()
    folder = binaries.CACHE / "npm" / f"socketio-{hashlib.sha256(lock).hexdigest()[:12]}"
    shutil.copytree(SOCKET_IO, folder, dirs_exist_ok=True)
    if not (folder / "fetched").exists():
        words = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Missing(f"npm could not fetch Socket.IO: {done.stderr.strip()[-300:]}")
        (folder / "fetched").touch()
    return folder


def _socket_io(redis: str) -> Running:
    port = free_port()
    node = Binary("node", Path(shutil.which("node") or "node"), "path")
    script = str(socket_io_folder() / "server.mjs")
    server = Listening(node, [script, redis, str(port)], port, new_folder("socketio")).start()
    seat = Seat(port, "/socket.io/?EIO=4&transport=websocket", "socket.io")
    return Running(server, seat, partial(post, port, "/publish"))


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

OURS: tuple[Entrant, ...] = ()
PEERS = (SSE_STARLETTE, NCHAN_ENTRANT, SOCKET_IO_ENTRANT)
