"""The design that aggregators replaced: every rank's lines of JSON go to a thread of rank 0.

It listens, answers and keeps states as that thread did; here it is a process, whose time is read.
"""

import asyncio
import json
import sys
import time
from typing import Any


class Server:
    """Knows the last message of all ranks."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, Any]] = {}
        self.heard_s: dict[int, float] = {}
        self.changed_s = 0.0

    async def listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            rank = message["rank"]
            self.heard_s[rank] = time.monotonic()
            if message["at"] != self.seen.get(rank):
                self.changed_s = self.heard_s[rank]
            self.seen[rank] = message["at"]
            writer.write(b'"ok"\n')
            await writer.drain()
        writer.close()


async def serve(beat_s: float) -> None:
    state = Server()
    server = await asyncio.start_server(state.listen, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    silent = 0
    while True:
        await asyncio.sleep(beat_s / 2)
        now = time.monotonic()
        for heard_s in state.heard_s.values():
            silent += now - heard_s > 60


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
