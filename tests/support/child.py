"""A forked process of our own: it does some work, and is killed if it does not end by itself."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import traceback


class Child:
    """A forked process that does `work`; killed, if it has not ended by itself."""

    def __init__(self, work):
        self._code = None
        self.pid = os.fork()
        if self.pid == 0:
            self._do(work)

    def _do(self, work):
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - a child must not return into the parent's tests
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(code)

    def end(self):
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self):
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def kill_before(connections, nth):
    """Have this process killed before its nth statement to a SQLite file from now on."""
    count = itertools.count(1)

    def said(_):
        if next(count) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    connections.read(lambda connection: connection.set_trace_callback(said))
