"""Simulate how much device memory torch's caching allocator reserves for a list of requests.

The simulation follows c10/cuda in torch 2.11 to 2.13:

- Requests are rounded up to 512 bytes.
- Requests up to 1 MiB share segments of 2 MiB. Requests below 10 MiB share segments of 20 MiB. A
  larger request gets a separate segment, rounded up to 2 MiB.
- A request takes the smallest free block that fits. The block is split if at least 512 bytes (small
  requests) or more than 1 MiB (large requests) are left. Free neighbours merge.
- Streams never share blocks.
- With expandable segments, each stream has one segment for small and one for large requests. A
  segment grows by pages of 2 or 20 MiB, so no memory is lost at the ends of many segments.
- When the device is full, free segments are returned to it once before the request fails.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from wlb.rehearse.gpu import FREED, AllocatorRequest
from wlb.rehearse.results import Reserved

MIB = 1 << 20
SMALL, LARGE = MIB, 10 * MIB
"""Largest small request, and smallest request that gets a separate segment, in bytes."""
PAGE_SMALL, PAGE_LARGE = 2 * MIB, 20 * MIB
"""Bytes of a segment, or of a page of an expandable segment, for small and for large requests."""


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, which either is free or holds the memory of one request."""

    size: int  # bytes
    is_free: bool = True
    before: "Block | None" = None  # previous block in the segment; None for the first block
    after: "Block | None" = None  # next block in the segment; None for the last block


@dataclass(slots=True)
class _Pool:
    """Free blocks of one stream for small or for large requests."""

    is_small: bool  # whether the pool is for small requests
    # (size, id, block) of each free block, sorted, so that bisection finds the smallest that fits.
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    last: Block | None = None  # last block of the pool's expandable segment; None = no segment yet

    def put(self, block: Block) -> None:
        bisect.insort(self.free, (block.size, id(block), block))

    def remove(self, block: Block) -> None:
        del self.free[bisect.bisect_left(self.free, (block.size, id(block)))]

    def fitting(self, size: int) -> Block | None:
        i = bisect.bisect_left(self.free, (size, 0))
        return self.free.pop(i)[2] if i < len(self.free) else None


class _Full(Exception):
    """Raised when the allocator cannot get more memory from the device."""


class Allocator:
    """Simulates the caching allocator of one device.

    Args:
        limit: Most bytes that may be reserved on the device.
        expandable: Whether segments are expandable (PYTORCH_CUDA_ALLOC_CONF).
    """

    def __init__(self, *, limit: int, expandable: bool) -> None:
        self.limit, self.expandable = limit, expandable
        self.reserved = self.peak = self.allocated = self.retries = self.peak_allocated = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._living: dict[int, tuple[Block, _Pool]] = {}

    def request(self, number: int, size: int, stream: int) -> None:
        """Allocate memory, or raise _Full if too little memory is left on the device.

        Args:
            number: Number by which `free` will refer to this memory.
            size: Bytes to allocate.
            stream: Id of the stream that allocates.
        """
        is_small = size <= SMALL
        pool = self._pools.setdefault((stream, is_small), _Pool(is_small))
        block = pool.fitting(size) or self._grow(pool, size)
        rest = block.size - size
        if rest >= 512 if is_small else rest > MIB:
            self._split(pool, block, size)
        block.is_free = False
        self._living[number] = block, pool
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, number: int) -> None:
        """Free the memory that was allocated under `number`."""
        block, pool = self._living.pop(number)
        self.allocated -= block.size
        block.is_free = True
        # Merge the block with its free neighbours.
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                pool.remove(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                if pool.last is second:
                    pool.last = first
                block = first
        pool.put(block)

    def _split(self, pool: _Pool, block: Block, size: int) -> None:
        rest = Block(block.size - size, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if pool.last is block:
            pool.last = rest
        pool.put(rest)

    def _grow(self, pool: _Pool, size: int) -> Block:
        """Reserve device memory, and return a new free block of at least `size` bytes.

        The block is a new segment, or it extends the pool's expandable segment.
        """
        if not self.expandable:
            segment = PAGE_SMALL if pool.is_small else PAGE_LARGE
            if size >= LARGE:
                segment = -(-size // PAGE_SMALL) * PAGE_SMALL
            self._take(segment)
            return Block(segment)
        page = PAGE_SMALL if pool.is_small else PAGE_LARGE
        last = pool.last
        # If the last block of the segment is free, extend it and reserve only the missing bytes.
        have = last.size if last is not None and last.is_free else 0
        more = -(-(size - have) // page) * page
        self._take(more)
        if last is not None and last.is_free:
            pool.remove(last)
            last.size += more
            return last
        block = Block(more, before=last)
        if last is not None:
            last.after = block
        pool.last = block
        return block

    def _take(self, size: int) -> None:
        """Reserve `size` bytes of device memory.

        If that would exceed the limit, first return free segments to the device. Raise `_Full` if
        this does not help.
        """
        if self.reserved + size > self.limit:
            self.retries += 1
            self._give_back()
            if self.reserved + size > self.limit:
                raise _Full
        self.reserved += size
        self.peak = max(self.peak, self.reserved)

    def _give_back(self) -> None:
        """Return free segments, and free ends of expandable segments, to the device."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                is_whole = block.before is None and block.after is None
                if is_whole or (self.expandable and block is pool.last):
                    pool.remove(block)
                    self.reserved -= block.size
                    if self.expandable:
                        pool.last = block.before
                        if block.before is not None:
                            block.before.after = None


def reserved(requests: Iterable[AllocatorRequest], *, limit: int, expandable: bool) -> Reserved:
    """Return how much memory the allocator reserves on the device for the requests of a rank.

    The simulation ends at the first request that does not fit.

    Args:
        requests: Allocations and frees of the rank, in order.
        limit: Most bytes that may be reserved on the device.
        expandable: Whether segments are expandable (PYTORCH_CUDA_ALLOC_CONF).
    """
    allocator = Allocator(limit=limit, expandable=expandable)
    failed, failed_at = 0, ""
    for number, size, stream, step, where in requests:
        if size == FREED:
            allocator.free(number)
            continue
        try:
            allocator.request(number, size, stream)
        except _Full:
            failed, failed_at = size, f"step {step}, {where}"
            break
    return Reserved(
        peak_bytes=allocator.peak,
        allocated_bytes=allocator.peak_allocated,
        retries=allocator.retries,
        failed_bytes=failed,
        failed_at=failed_at,
    )
