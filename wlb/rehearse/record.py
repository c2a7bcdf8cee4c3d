"""Run operators on fake CUDA tensors, and record what a GPU would do for each.

CPU tensors stay real, so plans, index arrays and messages between hosts have the same values as in
a run. A tensor that moves to the GPU keeps its shape and loses its values. Every value that the
host reads from the GPU is zero.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from wlb.rehearse.fake_memory import FOOTPRINT
from wlb.rehearse.gpu import (
    GPU,
    Communicator,
    FakeEvent,
    FakeStream,
    RankMessage,
    RehearsalFault,
    Splits,
    called_from,
)
from wlb.rehearse.kernel_times import Prices, size_of

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_PLAIN = {Tensor, torch.nn.Parameter, FakeTensor, torch.nn.Buffer}
# Operators that launch no kernel on a GPU.
_NO_KERNEL = {
    f"aten::{name}"
    for name in (
        *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_"),
        *("detach", "alias", "lift_fresh", "set_", "is_pinned", "_reshape_alias", "lift"),
        *("_unsafe_view",),
    )
} | {"prim::device", "profiler::_record_function_enter_new", "profiler::_record_function_exit"}
ONE_KERNEL = {f"wlb::fused_{name}" for name in ("rotate", "gated", "norm", "sum_uses")}
ONE_KERNEL |= {f"wlb::fused_{name}_backward" for name in ("gated", "norm")}
"""Custom operators that are recorded as one kernel, because they launch one Triton kernel.

For any other custom operator, its Python body runs, and the operators in it are recorded."""
_ONLY_WRITTEN = ("out", "grad_input")
"""Names of arguments that a kernel writes but does not read."""
PINNED = WeakTensorKeyDictionary()
"""Pinned host tensor -> the copy from the GPU that fills it; None if there is no such copy.

A copy is (id of its stream, number of its kernel on that stream)."""
_ALL_TO_ALL = "all_to_all_single"
_UNNAMED = "undefined"
"""The description that torch gives a process group that was created without a description."""
# Operators for which the host waits, because the shape of their result depends on values.
_SYNCHRONIZES = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim"}


class Recorder(TorchDispatchMode):
    """Dispatch mode that sees every operator, runs it on fake tensors and records its effects.

    Args:
        prices: Predicts the times of kernels and transfers.
        fakes: Mode in which operators on fake tensors run.

    Attributes:
        axes: Name of a process group -> communicator. The groups of the mesh are added when the
            mesh is built, and other groups when they are first used.
        last: Stream of the latest asynchronous collective.
    """

    def __init__(self, prices: Prices, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.prices, self.fakes = prices, fakes
        self.axes: dict[str, Communicator] = {}
        self.last = GPU.current
        self._written: dict[Any, tuple[int, ...]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _PLAIN.issuperset(types):
            return NotImplemented  # a subclass such as DTensor must first unwrap its tensors
        if not GPU.is_counting:
            return func(*args, **kwargs)
        try:
            return self._run(func, args, kwargs)
        except Exception:
            if GPU.failing is None:
                GPU.failing = (str(func), called_from(1))
            raise

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        name: str = func._schema.name
        GPU.op = str(func)
        if name == "prim::device" and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # early, as this operator is the most frequent
        # 1. Operators on CPU tensors run as they are. Only messages between hosts are recorded.
        flat = [*_leaves(args, Tensor), *_leaves(kwargs, Tensor)]
        ours = [x for x in flat if x.device.type == "cuda"]
        if not ours and not _makes_cuda(kwargs):
            if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
                self._communicate(name, args, flat)
            if name == "c10d::recv_":
                flat[0].zero_()  # no other process sends data, so receive zeros
            return func(*args, **kwargs)
        # 2. Composite operators are decomposed, and this function is called for each part.
        if name.startswith("wlb::") and name in OPDEFS and name not in ONE_KERNEL:
            with self:  # record the operators in the body of the custom operator
                return OPDEFS[name]._init_fn(*args, **kwargs)
        if name.startswith("aten::") and _has_kernel(func.name(), "CompositeImplicitAutograd"):
            with self:  # inside custom ops, torch does not decompose operators such as linear
                return func.decompose(*args, **kwargs)
        # 3. The host waits if it needs a value, or a shape that depends on values.
        if name == "aten::_local_scalar_dense":
            GPU.host_waits("item()")
            return 0.0 if args[0].dtype.is_floating_point else 0
        if name in _SYNCHRONIZES:
            GPU.host_waits(f"{name}: the length of its result depends on values")
        # 4. All other operators run on fake tensors, and their time and memory are recorded.
        with self.fakes:
            out = func(*args, **kwargs)
        if name != "prim::device":
            self._account(func, name, args, kwargs, ours, out)
        return out

    def _account(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        ours: list[Tensor],
        out: Any,
    ) -> None:
        outs = [x for x in _leaves(out, Tensor) if x.is_cuda]
        if name.startswith(("c10d::", "_c10d_functional::")):
            if "wait_tensor" in name:
                FOOTPRINT.wait_for(ours[0], GPU.current)
            elif "wrap_tensor" not in name:  # wrap_tensor is for autograd only and runs no kernel
                self._communicate(name, args, ours, outs)
            return
        if func.is_view or name in _NO_KERNEL:
            for x in outs:
                FOOTPRINT.add(x)
            return
        if _copies_between_hosts(name, args, out):
            _host_copy(name, args, kwargs, out)
        stream = GPU.current
        self._touch(func, args, kwargs, ours, outs, stream)
        # Arguments that a kernel only writes are among its results, so do not count them as read.
        only_written = {id(x) for k in _ONLY_WRITTEN for x in _leaves(kwargs.get(k), Tensor)}
        read = [x for x in ours if id(x) not in only_written]
        part, flops, num_bytes, time_ns, workspace = self.prices.kernel(name, args, read, outs)
        FOOTPRINT.temporary("attention workspace", workspace)
        GPU.count(part, num_bytes=num_bytes, flops=flops, time_ns=time_ns)
        stream.run(name, part, time_ns, called_from(3) if GPU.traces else "")

    def _touch(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        ours: list[Tensor],
        outs: list[Tensor],
        stream: FakeStream,
    ) -> None:
        """Record which tensors a kernel reads and writes, and check for races between streams.

        Args:
            func: The operator.
            args: Arguments of the operator.
            kwargs: Keyword arguments of the operator.
            ours: Tensors on the GPU among the arguments.
            outs: Tensors on the GPU that the operator returns.
            stream: Stream on which the kernel runs.
        """
        for x in ours:
            FOOTPRINT.read(x, stream)
        written = self._arguments_written(func)
        for i in written:
            name = func._schema.arguments[i].name
            for x in _leaves(args[i] if i < len(args) else kwargs.get(name), Tensor):
                if x.is_cuda:
                    FOOTPRINT.write(x, stream)
        for x in () if written else outs:
            FOOTPRINT.made(x, stream)

    def _arguments_written(self, func: Any) -> tuple[int, ...]:
        """Return the indices of the arguments that an operator writes according to its schema."""
        found = self._written.get(func)
        if found is None:
            arguments = func._schema.arguments
            found = tuple(
                i
                for i, a in enumerate(arguments)
                if a.alias_info is not None and a.alias_info.is_write
            )
            self._written[func] = found
        return found

    def communicator(self, group: dist.ProcessGroup) -> Communicator:
        """Return the communicator of a process group."""
        known = self.axes.get(group.group_name)
        if known is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            is_world = group is dist.group.WORLD
            name = group.group_name if group.group_desc == _UNNAMED else group.group_desc
            known = Communicator("world" if is_world else name, ranks)
            self.axes[group.group_name] = known
        return known

    def _communicate(
        self, name: str, args: tuple[Any, ...], ins: list[Tensor], outs: list[Tensor] | None = None
    ) -> None:
        """Record a collective, send or receive as a message of this rank.

        If a collective has CUDA tensors, also record it on the GPU (`transfer`).

        Args:
            name: Name of the operator.
            args: Arguments of the operator.
            ins: Tensors that the operator sends, or sends and receives.
            outs: Tensors that the operator only receives. None if there are no such tensors.
        """
        op = name.split("::")[1]
        if name.startswith("c10d::"):
            boxed = next(a for a in _leaves(args, torch.ScriptObject) if _is_group(a))
            group = dist.ProcessGroup.unbox(boxed)  # pyright: ignore[reportAttributeAccessIssue]
            waits = not any(a is True for a in args)  # only asyncOp can be True
        else:
            group = distributed_c10d._resolve_process_group(args[-1])  # pyright: ignore
            waits = False
        where = self.communicator(group)
        if op in ("send", "recv_"):
            peer = where.ranks[next(a for a in args if type(a) is int)]
            what = (tuple(ins[0].shape), str(ins[0].dtype))
            kind = op.rstrip("_")
            GPU.messages.append(RankMessage(where, kind, peer, what, called_from(3), GPU.step))
            return
        options = [a for a in args if isinstance(a, str)][:-1] if not waits else []
        splits = None
        shapes = [tuple(x.shape) for x in ins]
        if op == _ALL_TO_ALL:
            # Members may send different numbers of rows, which `prove` compares for each pair of
            # members. The remaining shape must be equal on all members.
            splits = Splits(tuple(args[1]), tuple(args[2]))
            shapes = [shape[1:] for shape in shapes]
        kinds = ((str(x.dtype), x.device.type) for x in ins)
        what = ([(shape, *kind) for shape, kind in zip(shapes, kinds, strict=True)], options)
        here = called_from(3)
        GPU.messages.append(
            RankMessage(where, "collective", op, what, here, GPU.step, splits=splits)
        )
        if any(x.is_cuda for x in ins):
            self.transfer(where, op, ins, outs or [], is_async=not waits, splits=splits)

    def transfer(
        self,
        where: Communicator,
        op: str,
        ins: list[Tensor],
        outs: list[Tensor],
        *,
        is_async: bool,
        between: tuple[int, ...] = (),
        splits: Splits | None = None,
    ) -> FakeStream:
        """Record a collective or transfer on the GPU: its time, its bytes and its use of tensors.

        Args:
            where: Communicator of the operation.
            op: Name of the operation.
            ins: Tensors that are sent. They are also written if `outs` is empty.
            outs: Tensors that are received.
            is_async: Whether the operation runs on the communicator's stream instead of the current
                stream.
            between: The two ranks of a send or receive; empty for a collective.
            splits: Numbers of rows of an all-to-all; None for other operations.

        Returns:
            The stream on which the operation runs.
        """
        # Transfers between pipeline stages use several communicators, but count as one part.
        part = "pp" if between else where.axis
        stream = current = GPU.current
        if is_async:
            stream = _nccl_stream(where)
            stream.join(current.seen, current.time_ns, current.part)
            self.last = stream
        for x in ins:
            FOOTPRINT.write(x, stream) if not outs else FOOTPRINT.read(x, stream)
        for x in outs:
            FOOTPRINT.made(x, stream)
        if splits is None:
            size = max(size_of([x]) for x in [*ins, *outs])
            time_ns = self.prices.transfer(op, size, between or where.ranks)
        else:
            row_bytes = size_of(ins) / max(1, ins[0].shape[0])
            size, time_ns = self.prices.all_to_all(
                splits, row_bytes, where.ranks, own=where.ranks.index(dist.get_rank())
            )
        GPU.count(part, num_bytes=size, flops=0, time_ns=time_ns)
        stream.run(op, part, time_ns, called_from(4) if GPU.traces else "")
        for x in outs:
            FOOTPRINT.landed(x, stream)
        return stream


def _nccl_stream(where: Communicator) -> FakeStream:
    name = f"NCCL {where.axis} {where.ranks[0]}-{where.ranks[-1]} of {len(where.ranks)}"
    found = next((s for s in GPU.streams if s.name == name), None)
    return found or FakeStream(name=name)


def _leaves(tree: Any, kind: Any) -> list[Any]:
    """Return all objects of type `kind` in nested tuples, lists and dicts.

    This is several times faster than torch's pytree. It is enough here, because arguments and
    results of operators are nested in no other containers.
    """
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [leaf for branch in tree for leaf in _leaves(branch, kind)]


def _is_group(a: Any) -> bool:
    return "ProcessGroup" in str(a._type())


def _makes_cuda(kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cuda"


def _copies_between_hosts(name: str, args: tuple[Any, ...], out: Any) -> bool:
    if name == "aten::copy_":
        return args[0].device.type != args[1].device.type
    return name == "aten::_to_copy" and args[0].device.type != out.device.type


def _host_copy(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
    """Record a copy between host and GPU, and whether the host waits for it.

    The host waits, unless the copy is asynchronous (non_blocking) and the host's memory is pinned.

    Args:
        name: Name of the operator: aten::copy_ or aten::_to_copy.
        args: Arguments of the operator.
        kwargs: Keyword arguments of the operator.
        out: Result of the operator.
    """
    source, target = (args[1], args[0]) if name == "aten::copy_" else (args[0], out)
    is_up = target.device.type == "cuda"
    host = source if is_up else target
    is_async = args[2] if name == "aten::copy_" and len(args) > 2 else kwargs.get("non_blocking")
    kind = "to the device" if is_up else "to the host"
    if not is_async:
        GPU.host_waits(f"copy {kind}")
    elif name == "aten::_to_copy" and not is_up:
        # torch allocates the result in pinned memory, and the copy is the stream's next kernel.
        PINNED[host] = GPU.current.id, GPU.current.seen[GPU.current.id] + 1
    elif not is_pinned(host):
        GPU.host_waits(f"copy {kind}, because the host's memory is not pinned")


def is_pinned(tensor: Tensor) -> bool:
    """Return whether a host tensor is in pinned memory."""
    return tensor in PINNED


def check_copied(host: Tensor, event: FakeEvent | None) -> None:
    """Check that a copy from the GPU has ended before the host reads its result.

    Args:
        host: Host tensor that the copy fills.
        event: Event that the host waits for before it reads the tensor; None if it does not wait.

    Raises:
        RehearsalFault: If the copy may not have ended.
    """
    stream, count = PINNED.get(host) or (0, 0)
    if count > (0 if event is None else event.seen[stream]):
        raise RehearsalFault(
            f"the host reads a tensor of shape {tuple(host.shape)} before the copy that fills it "
            f"on {GPU.streams[stream].name} has ended; record an event after the copy, and wait "
            f"for this event before reading"
        )
