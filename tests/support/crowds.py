"""Viewers over bare sockets, by the hundred: each has a cursor, what came, and no client's wits."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

from support.process import HOST

_STATUS = re.compile(rb"HTTP/1\.[01] (\d+)")
_EVENT = re.compile(rb"^event: (\w+)$", re.MULTILINE)
_ID = re.compile(rb"^id: (\S+)$", re.MULTILINE)
_RETRY = re.compile(rb"^retry: (\d+)$", re.MULTILINE)


class Viewer:
    """One viewer of one job, who connects when it is told to."""

    def __init__(self, port, job, cursor=None):
        self.port, self.job, self.cursor = port, job, cursor
        self.offsets = []
        """Of the entries that came, and None for each reset."""
        self.others = []
        self.data = []
        self.states = []
        self.status = None
        self.retry_s = 0.0
        self._writer = None
        self._reading = None

    async def connect(self, *headers):
        """Ask, and go on reading what comes. A gateway that says when is asked again then."""
        while True:
            self.status, rest, reader = await self._asked(headers)
            if self.status != 503:
                break
            self._writer.close()
            await asyncio.sleep(1.0)
        self._reading = asyncio.ensure_future(self._read(reader, rest))
        return self

    async def _asked(self, headers):
        reader, self._writer = await asyncio.open_connection(HOST, self.port, limit=1 << 20)
        words = [f"GET /{self.job} HTTP/1.1", "Host: x", "Accept: text/event-stream", *headers]
        if self.cursor is not None:
            words.append(f"Last-Event-ID: {self.cursor}")
        self._writer.write(("\r\n".join(words) + "\r\n\r\n").encode("latin-1"))
        head = await reader.readuntil(b"\r\n\r\n")
        return int(_STATUS.match(head)[1]), b"", reader

    async def _read(self, reader, body):
        while size := int((await reader.readline()).strip() or b"0", 16):
            body += await reader.readexactly(size + 2)
            body = body[:-2]
            *whole, body = body.split(b"\n\n")
            for frame in whole:
                self._take(frame)

    def _take(self, frame):
        event, id, retry = _EVENT.search(frame), _ID.search(frame), _RETRY.search(frame)
        name = event[1].decode() if event else ""
        if retry:
            self.retry_s = int(retry[1]) / 1000
        if name == "reset":
            self.offsets.append(None)
            self.states.append(frame)
        elif name == "message":
            self.offsets.append(int(id[1].partition(b".")[0]))
            self.data.append(frame)
        elif name not in {"hello", "head", ""}:
            self.others.append(name)
        if id:
            self.cursor = id[1].decode()

    @property
    def reached(self):
        return int((self.cursor or "0").partition(".")[0])

    async def until(self, condition, within_s=30.0):
        async with asyncio.timeout(within_s):
            while not condition(self):
                assert self._reading is None or not self._reading.done() or condition(self), (
                    f"it has ended: {self.status}, {self.offsets[-3:]}, {self._reading}"
                )
                await asyncio.sleep(0.01)
        return self

    def cut(self):
        """Without a word, and whatever is on the way is lost."""
        self._reading.cancel()
        self._writer.transport.abort()

    async def close(self):
        self.cut()
        await asyncio.wait([self._reading])


class Dribble:
    """Takes a byte a second, and comes back at once, from the beginning, when it is dropped."""

    def __init__(self, port, job):
        self._at = (port, job)
        self._socket = None
        self.dropped = 0
        self.taken = 0

    def step(self):
        """One second's worth."""
        if self._socket is None:
            self._connect()
        try:
            taken = self._socket.recv(1)
        except BlockingIOError:
            return
        except ConnectionError:
            taken = b""
        self.taken += len(taken)
        if not taken or self._is_reset():
            self.dropped += 1
            self.close()

    def _connect(self):
        port, job = self._at
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect((HOST, port))
        words = f"GET /{job} HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n"
        self._socket.sendall(words.encode())
        self._socket.setblocking(False)

    def _is_reset(self):
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0

    def close(self):
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def rss_mib(pid):
    """Of a process, where the system tells; else 0."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return int(re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)[1]) / 1024
