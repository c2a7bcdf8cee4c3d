"""Attention by the three optional FlashAttention packages: 2 (flash-attn), 3 and 4.

All compute float16 and bfloat16, with head sizes that are multiples of 8. The names of their
parameters come from the sources of the versions below. Tests put functions with the same parameters
in place of the packages. FlashAttention-3 has run on an H100; **2 and 4 have not run on a GPU
here**.
"""

import torch

from wlb.kernels.flash_package import (
    FlashBackend,
    FlashFunction,
    KernelPackage,
    before_ampere,
    wrong_head_size,
)
from wlb.kernels.segments import Scores
from wlb.spec import AttentionBackend

# Arguments of backward, besides those of every call, in FlashAttention-2 and 3. Their backward
# functions write dq, dk and dv into tensors that we pass.
_WRITTEN = ("dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic")
_NO_WINDOW = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0}
_FLASH2 = {**_NO_WINDOW, "causal": True, "dropout_p": 0.0, "alibi_slopes": None}
_FLASH4 = {"window_size_left": None, "window_size_right": None, "softcap": 0.0, "causal": True}


def wheel_index(cuda: str | None) -> str:
    """Return the URL of PyTorch's wheels for a CUDA version such as "12.8"; None means 13.0."""
    return f"https://download.pytorch.org/whl/cu{(cuda or '13.0').replace('.', '')}"


class Flash2Backend(FlashBackend):
    """FlashAttention-2 from the package flash-attn; torch_varlen has the same kernels in torch.

    The deterministic backward keeps ceil(multiprocessors / (segments * heads)) float32 copies of
    dQ. On an H100 these are five copies of 2.1 GB for one segment of 131,072 tokens with 32 heads
    of size 128.
    """

    backend = AttentionBackend.FLASH_ATTENTION_2
    package = KernelPackage(
        distribution="flash-attn",
        module="flash_attn.flash_attn_interface",
        supported="flash-attn 2.8.3",
        install="pip install flash-attn==2.8.3 --no-build-isolation, which needs nvcc",
        functions=(
            FlashFunction("_flash_attn_varlen_forward", (), {**_FLASH2, "return_softmax": False}),
            FlashFunction("_flash_attn_varlen_backward", _WRITTEN, _FLASH2),
        ),
    )
    # If max_q is 1 and heads are grouped, the package assumes decoding with exactly one query in
    # every segment, but our segments may have none. A larger max_q changes only the launch size.
    least_max_q = 2

    def wrong_device(self, major: int, minor: int, head_size: int) -> str | None:
        """Return why the package does not support this GPU or head size, or None if it does."""
        return before_ampere(major, minor) or wrong_head_size(head_size, 256)


class Flash3Backend(FlashBackend):
    """FlashAttention-3 on Hopper GPUs; the package's kernels for Ampere are not used.

    The names of parameters come from the folder hopper of the flash-attention repository, as it was
    from February to August 2026. Beta versions before autumn 2025 have other parameters and are
    refused.
    """

    backend = AttentionBackend.FLASH_ATTENTION_3
    package = KernelPackage(
        distribution="flash-attn-3",
        module="flash_attn_interface",
        supported="flash-attn-3 3.0.0",
        install=f"pip install --no-deps flash-attn-3 --index-url {wheel_index(torch.version.cuda)}",
        functions=(
            # Do not split keys over thread blocks, because this helps only decoding, and results
            # would depend on the number of splits.
            FlashFunction(
                "_flash_attn_forward", (), _NO_WINDOW | {"causal": True, "num_splits": 1}
            ),
            FlashFunction("_flash_attn_backward", _WRITTEN, {**_NO_WINDOW, "is_causal": True}),
        ),
    )

    def wrong_device(self, major: int, minor: int, head_size: int) -> str | None:
        """Return why the package does not support this GPU or head size, or None if it does."""
        if major != 9:
            return f"only compute capability 9.x (Hopper) is supported, not {major}.{minor}"
        return wrong_head_size(head_size, 192 if self.deterministic else 256)


class Flash4Backend(FlashBackend):
    """FlashAttention-4 for Hopper and Blackwell, of which there are only pre-releases so far.

    The package compiles a kernel when a call of a new kind is made. A run therefore makes a call of
    each kind (`compiled_calls`) before its first step (`wlb.train.warm_up`). flash-attn 2.8.3
    contains an older copy of the package, which is refused.
    """

    backend = AttentionBackend.FLASH_ATTENTION_4
    package = KernelPackage(
        distribution="flash-attn-4",
        module="flash_attn.cute.interface",
        supported="flash-attn-4 4.0.0b36",
        install="pip install 'wlb-llm[flash]', and on CUDA 13 also 'flash-attn-4[cu13]'",
        functions=(
            FlashFunction("_flash_attn_fwd", (), {**_FLASH4, "return_lse": True}),
            FlashFunction("_flash_attn_bwd", ("dout", "out", "lse", "deterministic"), _FLASH4),
        ),
    )

    def wrong_device(self, major: int, minor: int, head_size: int) -> str | None:
        """Return why the package does not support this GPU or head size, or None if it does."""
        is_blackwell = major == 10
        if major != 9 and not is_blackwell:
            return f"only compute capability 9.x and 10.x are supported, not {major}.{minor}"
        return wrong_head_size(head_size, 128 if is_blackwell and head_size != 256 else 256)

    def compiled_calls(
        self, queries_per_key: int, *, is_causal: bool
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return a small example of each kind of call that the package compiles separately.

        Kinds differ in whether there are more than 256 segments, and in whether the longest segment
        fits into one tile of queries and into one tile of keys. A tile has 48 to 128 rows in
        backward. In forward it has 128 to 256 rows, counted over the query heads that share a key
        head. With heads of size 256, a B200 has one more kind: calls in which the segments
        that fit into one tile each outnumber the GPU's pairs of multiprocessors.

        A call is returned as a pair (queries, keys) for each of its segments.

        Args:
            queries_per_key: Query heads per key head.
            is_causal: Whether the mask is causal.
        """
        longest = [(1, 1), (1, 512), (max(1, 256 // queries_per_key), 512), (512, 512)]
        longest.append((96, 96) if is_causal else (512, 1))
        short = ((1, 1),) * 256
        return tuple((one, *rest) for one in dict.fromkeys(longest) for rest in ((), short))

    def wrong_scores(self, major: int, head_size: int, scores: Scores) -> str | None:
        """Return why the package cannot compute these scores on this GPU, or None if it can.

        Scores (QK^T) may be limited to a sliding window, and may be capped by a tanh.
        """
        if major == 10 and head_size == 256 and (scores.softcap or scores.sliding):
            return (
                "on compute capability 10.x, backward with heads of 256 supports neither sliding "
                "windows nor caps on scores (model.attention_softcap)"
            )
        return None


FLASH2, FLASH3, FLASH4 = Flash2Backend(), Flash3Backend(), Flash4Backend()
FLASH_BACKENDS: tuple[FlashBackend, ...] = (FLASH2, FLASH3, FLASH4)
DETERMINISTIC_FLASH_BACKENDS = tuple(type(x)(deterministic=True) for x in FLASH_BACKENDS)
