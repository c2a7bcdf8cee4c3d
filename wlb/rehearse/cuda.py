"""Replace parts of torch.cuda and torch.distributed for the rest of a rehearsing process's life.

The fakes of `gpu.py` take the place of streams and events. Collectives go to torch's fake process
group. Transfers between pipeline stages are recorded. Every value that the host reads from the GPU
is zero.
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode, fake_tensor
from torch.distributed import distributed_c10d

from wlb.kernels.fused import select
from wlb.rehearse import compiler, record
from wlb.rehearse.fake_memory import FOOTPRINT
from wlb.rehearse.gpu import GPU, FakeEvent, FakeStream, RankMessage, called_from
from wlb.rehearse.record import Recorder
from wlb.train import refuse

DEVICE = torch.device("cuda", 0)
HOPPER = (9, 0)
"""Compute capability of the rehearsed GPU."""
NUM_SMS = 132
"""Streaming multiprocessors of the rehearsed GPU, an H100."""
_KERNELS = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")
_libraries: list[Any] = []


def install() -> None:
    """Make torch use a fake GPU and fake process groups. Call this once, before `describe`."""
    GPU.device = DEVICE
    _streams()
    _tensors()
    # Autograd must run in this thread, because dispatch modes are active only in this thread.
    torch.autograd.set_multithreading_enabled(False)
    setattr(FakeTensorMode, "avoid_device_init", property(lambda _: True))  # noqa: B010
    # init_gpu_context creates a tensor on the GPU, which fails in a CUDA build without a GPU.
    setattr(fake_tensor, "init_gpu_context", lambda _: None)  # noqa: B010
    # This makes torch.tensor(..., device="cuda") count as a copy from the host.
    torch._C._set_only_lift_cpu_tensors(True)
    importlib.import_module("torch.distributed._tools.fake_collectives")
    _shapes_of_whole_tensors()
    _register_kernels()
    # A CUDA build would ask the GPU which attention kernel to use. Use the kernel of a CPU build.
    setattr(torch.nn.functional, "scaled_dot_product_attention", _attention)  # noqa: B010
    # Triton cannot launch kernels here, without a GPU. Report no problem, because Triton can launch
    # kernels on the rehearsed GPU.
    setattr(select, "launch_problem", lambda _: None)  # noqa: B010
    setattr(refuse, "refuse_uncompilable", compiler.refuse_other_backends)  # noqa: B010
    _groups()


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *, is_causal: bool = False
) -> Tensor:
    out, _ = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, attn_mask, 0.0, is_causal)
    return out


def describe(*, name: str, memory_bytes: int, local_ranks: int) -> None:
    """Make functions such as torch.cuda.get_device_properties return those of the rehearsed GPU.

    Args:
        name: Name of the GPU.
        memory_bytes: Memory of the GPU in bytes.
        local_ranks: Number of GPUs in a node.
    """
    cuda = torch.cuda
    major, minor = HOPPER
    properties = SimpleNamespace(
        name=name,
        total_memory=memory_bytes,
        major=major,
        minor=minor,
        multi_processor_count=NUM_SMS,
        uuid="rehearsed",
    )
    fixed: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": local_ranks,
        "current_device": 0,
        "set_device": None,
        "get_device_capability": HOPPER,
        "get_device_name": name,
        "get_device_properties": properties,
        "can_device_access_peer": True,
        "is_current_stream_capturing": False,
        "_lazy_init": None,
        "empty_cache": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
    }
    for attribute, value in fixed.items():
        setattr(cuda, attribute, lambda *_, value=value, **__: value)
    setattr(cuda, "synchronize", lambda *_: GPU.host_waits("torch.cuda.synchronize"))  # noqa: B010
    setattr(cuda, "mem_get_info", lambda *_: (memory_bytes - FOOTPRINT.now, memory_bytes))  # noqa: B010
    setattr(cuda, "memory_allocated", lambda *_: FOOTPRINT.now)  # noqa: B010
    setattr(cuda, "max_memory_allocated", lambda *_: FOOTPRINT.peak)  # noqa: B010


class _OnStream:
    """Replaces torch.cuda.stream. torch.compile uses it in isinstance, so it must be a class."""

    def __init__(self, stream: FakeStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            GPU.stack.append(self.stream)

    def __exit__(self, *_: Any) -> None:
        if self.stream is not None:
            GPU.stack.pop()


def _streams() -> None:
    FakeStream(name="compute")
    for owner in (torch.cuda, torch):
        setattr(owner, "Stream", FakeStream)  # noqa: B010
        setattr(owner, "Event", FakeEvent)  # noqa: B010
    for owner in (torch.cuda, torch.accelerator):  # torch.compile needs two different functions
        setattr(owner, "current_stream", lambda *_: GPU.current)  # noqa: B010
    for attribute, value in (
        ("default_stream", lambda *_: GPU.streams[0]),
        ("stream", _OnStream),
        ("StreamContext", _OnStream),
    ):
        setattr(torch.cuda, attribute, value)


def _tensors() -> None:
    def pin(tensor: Tensor, *_: Any) -> Tensor:
        pinned = tensor.clone()
        record.PINNED[pinned] = None
        return pinned

    def record_stream(tensor: Tensor, stream: FakeStream) -> None:
        if tensor.device.type == "cuda":
            FOOTPRINT.record_stream(tensor, stream)

    tolist, numpy = Tensor.tolist, Tensor.numpy

    def read_list(tensor: Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return tolist(tensor)
        GPU.host_waits("tolist()")
        return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()

    def read_numpy(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if isinstance(tensor, FakeTensor):  # a copy from the GPU, which is recorded already
            return torch.zeros(tensor.shape, dtype=tensor.dtype).numpy()
        return numpy(tensor, *args, **options)

    replaced: dict[str, Callable[..., Any]] = {
        "pin_memory": pin,
        "is_pinned": lambda tensor, *_: record.is_pinned(tensor),
        "record_stream": record_stream,
        "tolist": read_list,
        "numpy": read_numpy,
    }
    for attribute, value in replaced.items():
        setattr(Tensor, attribute, value)
    setattr(FakeTensor, "tolist", read_list)  # noqa: B010


def _shapes_of_whole_tensors() -> None:
    """Switch recording off while DTensor runs operators only to infer the shapes of whole tensors.

    A real run also executes these operators on fake tensors, so they use neither GPU time nor
    memory.
    """
    from torch.distributed.tensor import _sharding_prop

    propagator: Any = _sharding_prop.ShardingPropagator
    found = propagator._propagate_tensor_meta_non_cached

    def propagate(*args: Any, **options: Any) -> Any:
        before, GPU.is_counting = GPU.is_counting, False
        try:
            return found(*args, **options)
        finally:
            GPU.is_counting = before

    setattr(propagator, "_propagate_tensor_meta_non_cached", propagate)  # noqa: B010


def _register_kernels() -> None:
    # A CPU build has no CUDA kernels for these operators. It would decompose them, so that other
    # tensors would be saved for backward than on a GPU. The registered function is never called,
    # because fake tensors only check that a kernel exists.
    library = torch.library.Library("aten", "IMPL")
    for name in _KERNELS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, _never_called, "CUDA")
    _libraries.append(library)


def _never_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("a kernel of the rehearsed GPU was called with a real tensor")


def _groups() -> None:
    new_group = dist.new_group

    def fake_group(*args: Any, **options: Any) -> Any:
        return new_group(*args, **{**options, "backend": "fake"})

    for owner in (dist, distributed_c10d):
        setattr(owner, "new_group", fake_group)  # noqa: B010

    for function in (broadcast_object_list, gather, gather_object, all_gather_object):
        logged = _logged(function)
        for owner in (dist, distributed_c10d):
            setattr(owner, function.__name__, logged)


def broadcast_object_list(objects: list[Any], *_: Any, **__: Any) -> None:
    """Replace torch's broadcast of objects: every rank keeps the objects that it has."""


def gather(tensor: Tensor, gather_list: list[Tensor] | None = None, *_: Any, **__: Any) -> None:
    """Replace torch's gather: every entry of the list becomes this rank's tensor."""
    for row in gather_list or []:
        row.copy_(tensor)


def gather_object(obj: Any, found: list[Any] | None = None, *_: Any, **__: Any) -> None:
    """Replace torch's gather of objects: every entry of `found` becomes this rank's object."""
    if found is not None:
        found[:] = [obj] * len(found)


def all_gather_object(found: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    """Replace torch's all-gather of objects: every entry of `found` becomes this rank's object."""
    found[:] = [obj] * len(found)


def _logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective between hosts that also records each call in `GPU.messages`."""

    def call(*args: Any, group: Any = None, **options: Any) -> Any:
        where = recorder().communicator(_group(group))
        what = ("objects on hosts",)
        message = RankMessage(
            where, "collective", function.__name__, what, called_from(1), GPU.step
        )
        GPU.messages.append(message)
        return function(*args, **options)

    return call


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found


_recorders: list[Recorder] = []


def recorder() -> Recorder:
    """Return the recorder of this process, which `use` has set."""
    return _recorders[-1]


def use(made: Recorder) -> None:
    """Make `made` the recorder of this process. Call this once.

    From now on `made` records collectives between hosts, the transfers between pipeline stages and
    the operators of compiled graphs, too.
    """
    _recorders.append(made)
    setattr(torch, "compile", compiler.compiling(made))  # noqa: B010
    _transfers()
    _async_works()


_ASYNC = (
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor"),
    *("reduce_scatter_single", "all_reduce", "broadcast"),
)


def _async_works() -> None:
    """Make asynchronous collectives return a `FakeWork`, so that a stream can wait for them."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, async_op: bool = False, **options: Any) -> Any:
            work = function(*args, async_op=async_op, **options)
            return FakeWork(recorder().last) if async_op else work

        return call

    for name in _ASYNC:
        if hasattr(dist, name):
            call = wrapped(getattr(dist, name))
            for owner in (dist, distributed_c10d):
                setattr(owner, name, call)


class FakeWork:
    """Replaces the Work object that torch.distributed returns for an asynchronous collective."""

    def __init__(self, stream: FakeStream) -> None:
        self._done = FakeEvent().record(stream)

    def wait(self, *_: Any) -> bool:
        """Make the current stream wait for the collective."""
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        """Return True, because nothing runs in the background."""
        return True


class _Transfer(FakeWork):
    """Replaces torch's Work of a send or receive; `wait` records which message it waits for.

    The message is `GPU.messages[index]`.
    """

    def __init__(self, index: int, stream: FakeStream) -> None:
        super().__init__(stream)
        self.index = index

    def wait(self, *_: Any) -> bool:
        GPU.messages.append(RankMessage(None, "wait", None, self.index, called_from(1), GPU.step))
        return super().wait()


def _transfers() -> None:
    def post(kind: str, tensor: Tensor, peer: int, group: Any, batch: int = -1) -> _Transfer:
        where = recorder().communicator(_group(group))
        # torch 2.11 connects pipeline stages by sending a 0-d tensor to a 1-d receiver. Treat both
        # as shape (1,), so that they match.
        what = (tuple(tensor.shape) or (1,), str(tensor.dtype))
        here = called_from(2)
        GPU.messages.append(RankMessage(where, kind, peer, what, here, GPU.step, batch))
        index = len(GPU.messages) - 1
        if tensor.device.type != "cuda":
            if kind == "recv":
                tensor.zero_()  # no other process sends data, so receive zeros
            return _Transfer(index, GPU.current)
        ins, outs = ([tensor], []) if kind == "send" else ([], [tensor])
        # As in NCCL, all transfers of a process group run on the one stream of its communicator.
        between = tuple(sorted((dist.get_rank(), peer)))
        stream = recorder().transfer(where, kind, ins, outs, is_async=True, between=between)
        return _Transfer(index, stream)

    def isend(
        tensor: Tensor,
        dst: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> _Transfer:
        peer = dist.get_global_rank(group, group_dst) if dst is None else dst  # pyright: ignore[reportArgumentType]
        return post("send", tensor, peer, group)

    def irecv(
        tensor: Tensor,
        src: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> _Transfer:
        peer = dist.get_global_rank(group, group_src) if src is None else src  # pyright: ignore[reportArgumentType]
        return post("recv", tensor, peer, group)

    def batch(ops: list[dist.P2POp]) -> list[_Transfer]:
        peers = [dist.get_global_rank(_group(op.group), op.group_peer) for op in ops]
        kinds = ["send" if op.op is isend else "recv" for op in ops]
        number = len(GPU.messages)
        return [
            post(kind, op.tensor, peer, op.group, number)
            for kind, op, peer in zip(kinds, ops, peers, strict=True)
        ]

    for function in (isend, irecv):
        for owner in (dist, distributed_c10d):
            setattr(owner, function.__name__, function)
    for owner in (dist, distributed_c10d):
        setattr(owner, "batch_isend_irecv", batch)  # noqa: B010
