"""A broker that promises next to nothing: a queue per group, as a plain message server has it.

It does not deduplicate, knows no fence and no tail, is never full, and hands out again by itself
what a broken connection left behind. The contract must have something to say about such a one too.
"""

from __future__ import annotations

import asyncio

from semel.messages import Backlog, Delivery, Features, GroupBacklog, Refused, Taken

TURN_S = 0.005


class PlainQueue:
    features = Features(fenced=False, dedups="none", heals=False, bounded=False, leases=False)

    def __init__(self, *, shards=1):
        self.shards = shards
        self.queues = {}

    async def publish(self, batch):
        for message in batch.messages:
            try:
                message.payload.encode()
            except UnicodeEncodeError as error:
                return Refused(message, str(error))
            for (topic, _, shard), queue in self.queues.items():
                if (topic, shard) == (batch.topic, batch.shard):
                    queue.append((message, 1))
        return Taken(len(batch.messages))

    async def tail(self, topic, shard):
        return None

    async def join(self, topic, group):
        for shard in range(self.shards):
            self.queues.setdefault((topic, group, shard), [])

    async def consumer(self, topic, group, shard, *, name, fence):
        return PlainReader(self.queues[topic, group, shard])

    async def backlog(self, topic, shard):
        found = [(key[1], q) for key, q in self.queues.items() if key[::2] == (topic, shard)]
        groups = [GroupBacklog(group, len(queue), 0) for group, queue in found]
        return Backlog(topic, shard, max((len(q) for _, q in found), default=0), None, None, groups)

    async def aclose(self):
        pass


class PlainReader:
    def __init__(self, queue):
        self.queue = queue
        self.unfinished = {}
        self.handed = 0

    async def left_over(self, limit=1000):
        return []

    async def read(self, limit, *, wait_s=0.0):
        until = asyncio.get_running_loop().time() + wait_s
        while not self.queue and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(TURN_S)
        found = []
        while self.queue and len(found) < limit:
            self.handed += 1
            message, count = self.unfinished[self.handed] = self.queue.pop(0)
            found.append(Delivery(self.handed, message, count))
        return found

    async def reclaim(self, idle_s, limit=100):
        return []

    async def ack(self, deliveries):
        for delivery in deliveries:
            self.unfinished.pop(delivery.token, None)

    async def close(self):
        """As the server does it when the connection breaks: back to where they came from."""
        back = [(message, count + 1) for message, count in self.unfinished.values()]
        self.queue[:0] = back
        self.unfinished.clear()
