"""A server of feeds that does what it is told, to the byte: it speaks HTTP by hand.

    with Raw(sends(HEAD + b"..."), silent(), answers(204)) as server:
        ... feed(server.url) ...
    assert server.cursors == [None, "3.000000000003"]

Each connection plays the next part; the last part is played for all that follow.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from dataclasses import dataclass

from support.client_server import TLS
from support.process import HOST

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
PLAIN = HEAD + b"Connection: close\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunked(*pieces):
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece)


@dataclass
class Asked:
    """A request."""

    target: str
    headers: dict[str, str]


class Raw:
    """Listens while the `with` lasts; then every connection is closed, and every thread over."""

    def __init__(self, *parts, port=0, tls=False):
        self.parts = list(parts)
        self.port = port
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if tls else None
        if self._tls is not None:
            self._tls.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
        self.asked = []
        self.ended = threading.Semaphore(0)
        """Released when a client has hung up on a part that waits for that."""
        self._open = set()
        self._threads = []
        self._lock = threading.Lock()

    def __enter__(self):
        self._listener = socket.create_server((HOST, self.port))
        self.port = self._listener.getsockname()[1]
        self.url = f"http{'s' if self._tls else ''}://{HOST}:{self.port}/feeds/job-1"
        self._run(self._accept)
        return self

    def __exit__(self, *error):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)
            assert not thread.is_alive()

    @property
    def cursors(self):
        return [asked.headers.get("last-event-id") for asked in self.asked]

    def _run(self, work, *arguments):
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open.add(connection)
                self._run(self._play, connection)

    def _wrapped(self, connection):
        wrapped = self._tls.wrap_socket(connection, server_side=True)
        with self._lock:
            self._open.add(wrapped)
        return wrapped

    def _play(self, connection):
        with connection, contextlib.suppress(OSError):
            if self._tls is not None:
                connection = self._wrapped(connection)
            asked = _read(connection)
            if asked is not None:
                with self._lock:
                    self.asked.append(asked)
                    part = self.parts.pop(0) if len(self.parts) > 1 else self.parts[0]
                part(self, connection, asked)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _read(connection):
    with connection.makefile("rb") as file:
        lines = [line.decode("latin-1").strip() for line in iter(file.readline, b"\r\n") if line]
    if not lines:
        return None
    headers = [line.partition(":") for line in lines[1:]]
    return Asked(lines[0].split()[1], {name.lower(): text.strip() for name, _, text in headers})


# --- parts --------------------------------------------------------------------------------------


def sends(raw, *, size=None):
    """These bytes, `size` at a time, then the end."""

    def part(server, connection, asked):
        for at in range(0, len(raw), size or len(raw) or 1):
            connection.sendall(raw[at : at + (size or len(raw))])

    return part


def holds(raw=b""):
    """These bytes, then nothing, until the client hangs up."""

    def part(server, connection, asked):
        connection.sendall(raw)
        with contextlib.suppress(OSError):
            while connection.recv(1000):
                pass
        server.ended.release()

    return part


def answers(status, body=b"", *, kind="application/problem+json", headers=()):
    """An answer in one piece."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} -", f"Content-Type: {kind}", "Connection: close"]
    lines += [f"{name}: {text}" for name, text in dict(headers).items()]
    if status != 204:
        lines.append(f"Content-Length: {len(body)}")
    return sends("\r\n".join([*lines, "", ""]).encode() + body)


def serves(answer, *cuts, framing=PLAIN):
    """What `answer` has for a cursor; the first connections are cut behind so many bytes."""
    left = list(cuts)

    def part(server, connection, asked):
        body = answer(asked.headers.get("last-event-id"))
        raw = framing + (chunked(*_pieces(body)) + b"0\r\n\r\n" if framing is CHUNKED else body)
        connection.sendall(raw[: left.pop(0)] if left else raw)

    return part


def _pieces(body):
    return [body[at : at + 50] for at in range(0, len(body), 50)]
