"""Measures the cost of a mask on CPU: `python -m experiments.cpu_span_attention`.

The case is a span of q queries at the end of a prefix of k keys, forward and backward, on one
thread (thread CPU time, best of 3). Compared are torch with a bool mask, torch with an additive
mask made once, and wlb's two flash calls (`wlb.kernels.sdpa`). Only ratios within one run are
meaningful.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from wlb.kernels import Segments, attend


def spans(q_1HQD: Tensor, k_1HKD: Tensor, v_1HKD: Tensor) -> Tensor:
    """Runs wlb's backend on one segment of the given rows."""
    q, k, v = (x[0].transpose(0, 1) for x in (q_1HQD, k_1HKD, v_1HKD))
    segments = Segments.from_offsets([0, q.shape[0]], [0, k.shape[0]], device="cpu")
    return attend(q, k, v, segments, backend="sdpa")


def timed(call: Callable[[Tensor, Tensor, Tensor], Tensor], shape: tuple[int, ...]) -> list[float]:
    heads, q, k, size = shape
    tensors = [torch.randn(1, heads, rows, size, requires_grad=True) for rows in (q, k, k)]
    best = [float("inf")] * 2
    for _ in range(3):
        begin = time.thread_time()
        out = call(*tensors)
        middle = time.thread_time()
        out.sum().backward()
        end = time.thread_time()
        best = [min(best[0], middle - begin), min(best[1], end - middle)]
    return [1e3 * b for b in best]


def main() -> None:
    torch.set_num_threads(1)
    print("heads     q     k  size | bool mask fwd bwd | additive fwd bwd | two calls fwd bwd (ms)")
    for shape in (
        (1, 2048, 8192, 16),
        (2, 2048, 8192, 16),
        (4, 1024, 4096, 16),
        (2, 512, 8192, 64),
    ):
        _, q, k, _ = shape
        seen = torch.ones(q, k, dtype=torch.bool).tril(k - q)
        additive = torch.zeros(q, k).masked_fill_(~seen, float("-inf"))
        results = [
            timed(lambda a, b, c, m=seen: F.scaled_dot_product_attention(a, b, c, m), shape),
            timed(lambda a, b, c, m=additive: F.scaled_dot_product_attention(a, b, c, m), shape),
            timed(spans, shape),
        ]
        print(
            " ".join(f"{x:5}" for x in shape),
            "| " + " | ".join(f"{fwd:7.1f} {bwd:7.1f}" for fwd, bwd in results),
        )


if __name__ == "__main__":
    main()
