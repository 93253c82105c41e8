"""A Redis and its replica, which takes over when it is told to, with what it has by then."""

from __future__ import annotations

from support import servers
from support.process import HOST, wait_until
from support.proxy import Proxy


class Pair:
    """A master, its replica, and an address that leads to whichever is the master."""

    def __init__(self):
        self.master, self.replica = servers.start_redis(), servers.start_redis()
        self.proxy = Proxy(self.master.port)
        # Told so on its command line, it would take a second to begin.
        servers.command(self.replica.port, "REPLICAOF", HOST, self.master.port)
        wait_until(self.in_step, "the replica to be in step")

    @property
    def url(self):
        return f"redis://{HOST}:{self.proxy.port}/0"

    def in_step(self):
        told = [servers.replication(server) for server in (self.master, self.replica)]
        is_up = told[1]["master_link_status"] == "up"
        return is_up and told[0]["master_repl_offset"] == told[1]["master_repl_offset"]

    def part(self):
        """When it has everything: from now on the replica hears of nothing."""
        wait_until(self.in_step, "the replica to be in step")
        self._promote()

    def _promote(self):
        servers.command(self.replica.port, "REPLICAOF", "NO", "ONE")

    def fail_over(self):
        """The replica is the master, with what it has."""
        self._promote()
        self.proxy.target = (HOST, self.replica.port)
        self.proxy.cut()
        self.master.kill()

    def stop(self):
        self.proxy.close()
        for server in (self.master, self.replica):
            server.kill()
            server.stop()
