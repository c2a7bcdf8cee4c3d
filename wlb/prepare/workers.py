"""Encode shards in worker processes or threads.

Each worker process opens the encoder once. Worker processes are spawned and import the main module,
so the program that calls `encode_shards` must guard its entry with `if __name__ == "__main__"`.
"""

import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import (
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
)
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from typing import Any

from wlb.data.leftovers import name_semaphores
from wlb.plan import UserError
from wlb.prepare.encode import RecordEncoder
from wlb.prepare.parts import PartJob, PartSummary, encode_shard
from wlb.prepare.records import AnyShard


def encode_shards(
    job: PartJob,
    shards: Sequence[AnyShard],
    numbers: Sequence[int],
    *,
    processes: int,
    in_threads: bool = False,
) -> Generator[PartSummary]:
    """Encode shards, and yield their summaries as they are finished, in any order.

    A UserError stops all workers. If several shards fail, the error of the shard with the lowest
    number is raised. Complete parts stay on disk, so that another call can resume.

    Args:
        job: Settings of all shards.
        shards: All shards.
        numbers: Numbers of the shards to encode.
        processes: Number of workers. With 1 the shards are encoded in this process.
        in_threads: Whether workers are threads, which unlike processes do not import the main
            module.

    Raises:
        RuntimeError: A worker process died.
    """
    if processes == 1 or len(numbers) <= 1:
        encoder = job.open_encoder() if numbers else None
        for number in numbers:
            assert encoder is not None
            yield encode_shard(job, encoder, number, shards[number])
        return
    pool, stop, encode = _open_pool(job, min(processes, len(numbers)), in_threads=in_threads)
    futures = {pool.submit(encode, number, shards[number]): number for number in numbers}
    try:
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            "a worker process died (killed, or out of memory); run the same command again to "
            "resume, with fewer --processes if memory was short"
        ) from None
    except UserError:
        pool.shutdown(wait=True, cancel_futures=True)
        raise _first_error(futures) from None
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _open_pool(
    job: PartJob, num_workers: int, *, in_threads: bool
) -> tuple[Executor, Any, Callable[[int, AnyShard], PartSummary]]:
    """Start a pool of workers.

    Returns:
        The pool, the event that makes its workers stop, and the function to submit for each shard.
    """
    if in_threads:
        stop, encoder = threading.Event(), job.open_encoder()

        def encode(number: int, shard: AnyShard) -> PartSummary:
            return encode_shard(job, encoder, number, shard, is_stopped=stop.is_set)

        return ThreadPoolExecutor(num_workers), stop, encode
    name_semaphores()
    context = get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start_worker, initargs=(job, stop)
    )
    return pool, stop, _encode


def _first_error(futures: dict[Future[PartSummary], int]) -> BaseException:
    """Return the error of the failed shard with the lowest number.

    Workers take shards in the order of their numbers, and have stopped when this is called. So all
    shards with lower numbers were tried.
    """
    for future in sorted(futures, key=lambda f: futures[f]):
        if not future.cancelled() and (error := future.exception()) is not None:
            return error
    raise AssertionError("no shard failed")


# The job, the encoder and the stop event of this worker process. They are global because there
# is no other way to pass them from a pool's initializer to the functions that the worker runs.
_worker: tuple[PartJob, RecordEncoder, Any] | None = None


def _start_worker(job: PartJob, stop: Any) -> None:
    global _worker
    # Ctrl-C reaches all processes. The parent handles it and sets `stop`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = (job, job.open_encoder(), stop)


def _end_with_parent() -> None:
    """End this process when its parent process ends, even if the parent is killed."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _encode(number: int, shard: AnyShard) -> PartSummary:
    assert _worker is not None
    job, encoder, stop = _worker
    return encode_shard(job, encoder, number, shard, is_stopped=stop.is_set)
