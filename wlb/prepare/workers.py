"""Worker processes that encode shards. Each opens the encoder once and writes whole parts.

Workers are spawned, so nothing of the calling process is in them: call from a program that can be
imported (`if __name__ == "__main__"`). A worker ends when the process that started it has gone.
"""

import os
import signal
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from typing import Any

from wlb.prepare.encode import RecordEncoder
from wlb.prepare.parts import PartJob, PartSummary, encode_shard
from wlb.prepare.records import Shard


def encode_shards(
    job: PartJob, shards: Sequence[Shard], numbers: Sequence[int], *, processes: int
) -> Generator[PartSummary]:
    """Encodes the shards of `numbers`; summaries as they are made, in any order.

    A ValueError of a shard stops the others; of several that of the first shard is raised. What is
    complete stays. RuntimeError if a worker dies. One process encodes in this one.
    """
    if processes == 1 or len(numbers) <= 1:
        encoder = job.encoder.open() if numbers else None
        for number in numbers:
            assert encoder is not None
            yield encode_shard(job, encoder, number, shards[number])
        return
    context = get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(
        min(processes, len(numbers)),
        mp_context=context,
        initializer=_start_worker,
        initargs=(job, stop),
    )
    futures = {pool.submit(_encode, number, shards[number]): number for number in numbers}
    try:
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            "a worker process died (killed, or out of memory); run the same command again to go "
            "on from the parts that are complete, with fewer --processes if memory was short"
        ) from None
    except ValueError:
        pool.shutdown(wait=True, cancel_futures=True)
        raise _first_error(futures) from None
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _first_error(futures: dict[Future[PartSummary], int]) -> BaseException:
    """The error of the lowest shard: shards start in order, so those before it have ended."""
    for future in sorted(futures, key=lambda f: futures[f]):
        if not future.cancelled() and (error := future.exception()) is not None:
            return error
    raise AssertionError("no shard failed")


# One job a worker process, given when it starts: a pool has no other way to keep it.
_worker: tuple[PartJob, RecordEncoder, Any] | None = None


def _start_worker(job: PartJob, stop: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted and sets `stop`
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = (job, job.encoder.open(), stop)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _encode(number: int, shard: Shard) -> PartSummary:
    assert _worker is not None
    job, encoder, stop = _worker
    return encode_shard(job, encoder, number, shard, is_stopped=stop.is_set)
