"""Tests of the two rules of streams, on storages that are plain objects."""

import pytest
import torch

from wlb.rehearse.fake_memory import BLOCK, Footprint
from wlb.rehearse.gpu import GPU, FakeEvent, FakeGpu, FakeStream, RehearsalFault


class Storage:
    """Stands for an untyped storage."""

    def __init__(self, size: int) -> None:
        self.size = size

    def nbytes(self) -> int:
        return self.size


class Tensor:
    """Stands for a tensor."""

    dtype, shape = "torch.float32", (4,)

    def __init__(self, size: int = 100) -> None:
        self.storage = Storage(size)

    def untyped_storage(self) -> Storage:
        return self.storage


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeStream, FakeStream]:
    fresh = FakeGpu()
    for name in FakeGpu.__slots__:
        monkeypatch.setattr(GPU, name, getattr(fresh, name))
    return FakeStream(name="compute"), FakeStream(name="other")


def made_on(footprint: Footprint, stream: FakeStream, size: int = 100) -> Tensor:
    GPU.stack.append(stream)
    tensor = Tensor(size)
    footprint.made(tensor, stream)
    stream.run("fill", "compute", 10)
    GPU.stack.pop()
    return tensor


def test_another_stream_waits_before_it_reads(streams: tuple[FakeStream, FakeStream]) -> None:
    compute, other = streams
    footprint = Footprint()
    tensor = made_on(footprint, other)
    with pytest.raises(RehearsalFault, match="without waiting for other, which wrote it"):
        footprint.read(tensor, compute)
    event = other.record_event()
    compute.wait_event(event)
    footprint.read(tensor, compute)


def test_an_event_before_the_kernel_does_not_help(streams: tuple[FakeStream, FakeStream]) -> None:
    compute, other = streams
    early = FakeEvent().record(other)
    tensor = made_on(footprint := Footprint(), other)
    early.wait(compute)
    with pytest.raises(RehearsalFault):
        footprint.read(tensor, compute)


def test_a_write_waits_for_readers(streams: tuple[FakeStream, FakeStream]) -> None:
    compute, other = streams
    tensor = made_on(footprint := Footprint(), compute)
    other.wait_stream(compute)
    footprint.read(tensor, other)
    other.run("read", "compute", 10)
    with pytest.raises(RehearsalFault, match="may still use it"):
        footprint.write(tensor, compute)
    compute.wait_stream(other)
    footprint.write(tensor, compute)


@pytest.mark.parametrize("remedy", ["none", "wait", "record_stream"])
def test_memory_is_not_reused_while_in_use(
    streams: tuple[FakeStream, FakeStream], remedy: str
) -> None:
    compute, other = streams
    tensor = made_on(footprint := Footprint(), other)
    compute.wait_stream(other)
    footprint.read(tensor, compute)
    compute.run("read", "compute", 10)
    if remedy == "record_stream":
        footprint.record_stream(tensor, compute)
    del tensor
    if remedy == "wait":  # also after the storage was freed
        other.wait_stream(compute)
    made_on(footprint, other)
    assert len(GPU.faults) == (remedy == "none")


def test_bytes_are_counted_in_blocks_by_kind_at_the_peak(
    streams: tuple[FakeStream, FakeStream],
) -> None:
    compute, _ = streams
    footprint = Footprint()
    first, second = made_on(footprint, compute, 1), made_on(footprint, compute, BLOCK + 1)
    assert footprint.now == footprint.peak == 3 * BLOCK
    del first
    assert (footprint.now, footprint.peak) == (2 * BLOCK, 3 * BLOCK)
    second.storage.size = 5 * BLOCK  # as FSDP resizes
    footprint.add(second)
    assert footprint.now == 5 * BLOCK
    footprint.temporary("workspace", 10)
    assert footprint.peak == 6 * BLOCK
    assert footprint.at_peak == {"activations": 5 * BLOCK, "workspace": BLOCK}
    assert [request.size for request in footprint.requests] == [512, 1024, -1, -1, 2560, 512, -1]


def test_a_transfer_is_waited_for_without_those_behind_it(
    streams: tuple[FakeStream, FakeStream],
) -> None:
    """Works of NCCL end one by one, so stages of an exchange hide behind each other's kernels."""
    compute, other = streams
    footprint, arriving = Footprint(), list[Tensor]()
    for _ in range(2):
        arriving.append(made_on(footprint, other))
        footprint.landed(arriving[-1], other)
    footprint.wait_for(arriving[0], compute)
    assert compute.time_ns == 10
    footprint.read(arriving[0], compute)
    with pytest.raises(RehearsalFault, match="without waiting for other, which wrote it"):
        footprint.read(arriving[1], compute)
    footprint.wait_for(arriving[1], compute)
    footprint.read(arriving[1], compute)
    assert compute.time_ns == 20


def test_a_wait_of_the_host_says_what_the_gpu_has_left(
    streams: tuple[FakeStream, FakeStream],
) -> None:
    compute, other = streams
    other.run("copy", "compute", 10)
    copied = other.record_event()
    compute.run("rows", "compute", 25)
    copied.synchronize()
    compute.synchronize()
    assert [wait.left_ns for wait in GPU.waits] == [15, 0]


def test_what_the_compute_stream_waits_for_is_exposed(
    streams: tuple[FakeStream, FakeStream],
) -> None:
    compute, other = streams
    other.run("all_gather", "cp", 100)
    compute.run("mm", "GEMM", 70)
    compute.wait_stream(other)
    assert GPU.exposed_ns == {"cp": 30}
    assert compute.time_ns == 100


def test_memory_of_a_backward_pass_has_its_own_kinds(
    streams: tuple[FakeStream, FakeStream],
) -> None:
    compute, _ = streams
    footprint = Footprint(parameter_shapes={(4,)})
    made: list[Tensor] = []

    def allocate(grad: torch.Tensor) -> torch.Tensor:
        made.append(made_on(footprint, compute))
        made.append(made_on(footprint, compute))
        return grad

    x = torch.zeros(4, requires_grad=True)
    x.register_hook(allocate)
    before = made_on(footprint, compute)
    (x * 2).sum().backward()
    assert before.storage.size == 100
    assert footprint.at_peak["activations"] == BLOCK
    assert footprint.at_peak["gradients"] == 2 * BLOCK
    footprint.parameter_shapes.clear()
    (x * 2).sum().backward()
    assert footprint.at_peak["backward"] == 2 * BLOCK
