"""The server of one WSGI request: what a client got of it, and where it may hang up."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass, field
from wsgiref.util import setup_testing_defaults

TEXT = ("Content-Type", "text/plain")


@dataclass
class Reply:
    """The response that a client received, and the errors that the server wrote."""

    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    errors: io.StringIO = field(default_factory=io.StringIO)

    @property
    def body(self):
        return b"".join(self.pieces)

    def header(self, name):
        return next((c for n, c in self.headers if n.lower() == name), None)

    @property
    def replayed(self):
        return self.header("idempotent-replayed") == "true"

    @property
    def problem(self):
        return json.loads(self.body)["type"].removeprefix("urn:semel:problem:")


def environ_of(body=b"", *, key='"k"', method="POST", path="/orders", **more):
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "CONTENT_LENGTH": str(len(body))}
    environ |= {"wsgi.input": io.BytesIO(body), "QUERY_STRING": "", "SCRIPT_NAME": ""}
    if key is not None:
        environ["HTTP_IDEMPOTENCY_KEY"] = key
    setup_testing_defaults(environ)
    return {name: c for name, c in (environ | more).items() if c is not None}


class Serving:
    """A server in the middle of one request: `pieces` may be read, or the client hangs up."""

    def __init__(self, app, environ):
        self.reply = Reply()
        environ["wsgi.errors"] = self.reply.errors
        self.iterable = app(environ, self.start_response)
        self.pieces = iter(self.iterable)

    def start_response(self, status, headers, exc_info=None):
        if exc_info is not None and self.reply.pieces:
            raise exc_info[1]
        assert exc_info is not None or not self.reply.status, "a second response was begun"
        self.reply.status, self.reply.headers = int(status[:3]), headers
        return self.reply.pieces.append

    def hang_up(self):
        self.iterable.close()

    def finish(self):
        try:
            self.reply.pieces.extend(self.pieces)
        finally:
            self.iterable.close()
        # An iterable that is garbage-collected before it is closed is reported there.
        assert self.reply.errors.getvalue() == ""
        return self.reply


def ask(app, body=b"", **environ):
    return Serving(app, environ_of(body, **environ)).finish()


def raised(error):
    """The `exc_info` of this error, raised."""
    try:
        raise error
    except type(error):
        return sys.exc_info()
