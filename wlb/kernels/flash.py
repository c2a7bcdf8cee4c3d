"""Attention by the three optional FlashAttention packages: 2 (flash-attn), 3 and 4.

All compute float16 and bfloat16 with head sizes in steps of 8. Their parameters were read in the
sources of the versions below, and calls are tested with stand-ins. FlashAttention-3 has run on an
H100; **2 and 4 have not run on a GPU here**.
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

# Arguments of backward functions that write dq, dk and dv into given tensors.
_WRITTEN = ("dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic")
_NO_WINDOW = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0}
_FLASH2 = {**_NO_WINDOW, "causal": True, "dropout_p": 0.0, "alibi_slopes": None}
_FLASH4 = {"window_size_left": None, "window_size_right": None, "softcap": 0.0, "causal": True}


def wheel_index(cuda: str | None) -> str:
    """Return PyTorch's index of wheels for a version of CUDA; None (CPU builds) means 13.0."""
    return f"https://download.pytorch.org/whl/cu{(cuda or '13.0').replace('.', '')}"


class Flash2Backend(FlashBackend):
    """FlashAttention-2, built separately; torch_varlen uses the same kernels inside torch.

    The deterministic backward keeps ceil(SMs / (segments * heads)) float32 copies of dQ. On an H100
    these are five copies of 2.1 GB for one segment of 131,072 tokens and 32 heads of 128.
    """

    backend = AttentionBackend.FLASH_ATTENTION_2
    package = KernelPackage(
        distribution="flash-attn",
        module="flash_attn.flash_attn_interface",
        supported="flash-attn 2.8.3",
        install="pip install flash-attn==2.8.3 --no-build-isolation, with nvcc",
        functions=(
            FlashFunction("_flash_attn_varlen_forward", (), {**_FLASH2, "return_softmax": False}),
            FlashFunction("_flash_attn_varlen_backward", _WRITTEN, _FLASH2),
        ),
    )
    # If max_q is 1 and heads are grouped, the package assumes decoding with exactly one query in
    # every segment, but ours may have none. A larger max_q only changes the launch size.
    least_max_q = 2

    def wrong_device(self, major: int, minor: int, head_size: int) -> str | None:
        """Return why this GPU or head size is not supported, or None."""
        return before_ampere(major, minor) or wrong_head_size(head_size, 256)


class Flash3Backend(FlashBackend):
    """FlashAttention-3 for Hopper; the package's kernels for Ampere are not offered.

    The sources were read in the folder hopper of the flash-attention repository, February to August
    2026. Betas before autumn 2025 differ and are refused.
    """

    backend = AttentionBackend.FLASH_ATTENTION_3
    package = KernelPackage(
        distribution="flash-attn-3",
        module="flash_attn_interface",
        supported="flash-attn-3 3.0.0",
        install=f"pip install --no-deps flash-attn-3 --index-url {wheel_index(torch.version.cuda)}",
        functions=(
            # Do not split keys: it helps only decoding, and each number of splits rounds
            # differently.
            FlashFunction(
                "_flash_attn_forward", (), _NO_WINDOW | {"causal": True, "num_splits": 1}
            ),
            FlashFunction("_flash_attn_backward", _WRITTEN, {**_NO_WINDOW, "is_causal": True}),
        ),
    )

    def wrong_device(self, major: int, minor: int, head_size: int) -> str | None:
        """Return why this GPU or head size is not supported, or None."""
        if major != 9:
            return f"compute capability 9.x (Hopper) only, not {major}.{minor}"
        return wrong_head_size(head_size, 192 if self.deterministic else 256)


class Flash4Backend(FlashBackend):
    """FlashAttention-4 for Hopper and Blackwell, so far only as pre-releases.

    It compiles a kernel at the first call of each kind. A run makes `compiled_calls` before its
    first step (`wlb.train.warm_up`). flash-attn 2.8.3 contains an older copy, which is refused.
    """

    backend = AttentionBackend.FLASH_ATTENTION_4
    package = KernelPackage(
        distribution="flash-attn-4",
        module="flash_attn.cute.interface",
        supported="flash-attn-4 4.0.0b36",
        install="pip install 'wlb-llm[flash]', on CUDA 13 with 'flash-attn-4[cu13]'",
        functions=(
            FlashFunction("_flash_attn_fwd", (), {**_FLASH4, "return_lse": True}),
            FlashFunction("_flash_attn_bwd", ("dout", "out", "lse", "deterministic"), _FLASH4),
        ),
    )

    def wrong_device(self, major: int, minor: int, head_size: int) -> str | None:
        """Return why this GPU or head size is not supported, or None."""
        is_blackwell = major == 10
        if major != 9 and not is_blackwell:
            return f"compute capability 9.x or 10.x only, not {major}.{minor}"
        return wrong_head_size(head_size, 128 if is_blackwell and head_size != 256 else 256)

    def compiled_calls(
        self, queries_per_key: int, *, is_causal: bool
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return a small call of each kind that is compiled separately.

        Kinds differ in whether there are more than 256 segments, and whether the longest segment
        fits into one tile of queries and one tile of keys. Tiles have 48 to 128 rows in backward;
        in forward they have 128 to 256 rows, counted over the query heads that share a key head.
        Heads of 256 on B200 have one more kind: more segments of one tile than half the
        multiprocessors.

        Args:
            queries_per_key: Query heads per key head.
            is_causal: Whether the mask is causal.
        """
        longest = [(1, 1), (1, 512), (max(1, 256 // queries_per_key), 512), (512, 512)]
        longest.append((96, 96) if is_causal else (512, 1))
        short = ((1, 1),) * 256
        return tuple((one, *rest) for one in dict.fromkeys(longest) for rest in ((), short))

    def wrong_scores(self, major: int, head_size: int, scores: Scores) -> str | None:
        """Return why these scores are not supported, or None."""
        if major == 10 and head_size == 256 and (scores.softcap or scores.sliding):
            return (
                "its backward of heads of 256 has neither sliding windows nor caps "
                "(attention_softcap) on compute capability 10.x"
            )
        return None


FLASH2, FLASH3, FLASH4 = Flash2Backend(), Flash3Backend(), Flash4Backend()
FLASH_BACKENDS: tuple[FlashBackend, ...] = (FLASH2, FLASH3, FLASH4)
DETERMINISTIC_FLASH_BACKENDS = tuple(type(x)(deterministic=True) for x in FLASH_BACKENDS)
