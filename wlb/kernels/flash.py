"""Attention by the three optional FlashAttention packages: 2 (flash-attn), 3 and 4.

All compute float16 and bfloat16 with heads in steps of 8. Their parameters were read in the source
of the versions below and are tested with stand-ins; **none has run on a GPU here**.
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

_WRITTEN = ("dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic")
_NO_WINDOW = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0}
_FLASH2 = {**_NO_WINDOW, "causal": True, "dropout_p": 0.0, "alibi_slopes": None}
_FLASH4 = {"window_size_left": None, "window_size_right": None, "softcap": 0.0, "causal": True}


def wheel_index(cuda: str | None) -> str:
    """PyTorch's index of wheels for a version of CUDA, that of 13.0 where torch is a CPU's."""
    return f"https://download.pytorch.org/whl/cu{(cuda or '13.0').replace('.', '')}"


class Flash2Backend(FlashBackend):
    """FlashAttention-2: the kernels that torch_varlen uses inside torch, in their own build.

    The deterministic backward keeps ceil(SMs / (segments * heads)) float32 copies of dQ: on an H100
    five of 2.1 GB for one segment of 131,072 tokens and 32 heads of 128.
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
    # With a maximum of 1 and grouped heads the package assumes decoding, with exactly one query in
    # every segment, but ours may have none. A larger maximum only changes the launch size.
    least_max_q = 2

    def wrong_device(self, major: int, minor: int, head_size: int) -> str | None:
        return before_ampere(major, minor) or wrong_head_size(head_size, 256)


class Flash3Backend(FlashBackend):
    """FlashAttention-3 for Hopper; the package's Ampere kernels are not offered.

    Read in the folder hopper of the flash-attention repository, February to August 2026. Betas
    before autumn 2025 differ and are refused.
    """

    backend = AttentionBackend.FLASH_ATTENTION_3
    package = KernelPackage(
        distribution="flash-attn-3",
        module="flash_attn_interface",
        supported="flash-attn-3 3.0.0",
        install=f"pip install --no-deps flash-attn-3 --index-url {wheel_index(torch.version.cuda)}",
        functions=(
            # Splitting keys helps decoding only, and every number of splits rounds differently.
            FlashFunction(
                "_flash_attn_forward", (), _NO_WINDOW | {"causal": True, "num_splits": 1}
            ),
            FlashFunction("_flash_attn_backward", _WRITTEN, {**_NO_WINDOW, "is_causal": True}),
        ),
    )

    def wrong_device(self, major: int, minor: int, head_size: int) -> str | None:
        if major != 9:
            return f"compute capability 9.x (Hopper) only, not {major}.{minor}"
        return wrong_head_size(head_size, 192 if self.deterministic else 256)


class Flash4Backend(FlashBackend):
    """FlashAttention-4 for Hopper and Blackwell, so far as pre-releases.

    A kernel is compiled when a call of its kind first comes: a run makes `compiled_calls` before
    its first step (`wlb.train.warm_up`). flash-attn 2.8.3 brings an older copy, which is refused.
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
        is_blackwell = major == 10
        if major != 9 and not is_blackwell:
            return f"compute capability 9.x or 10.x only, not {major}.{minor}"
        return wrong_head_size(head_size, 128 if is_blackwell and head_size != 256 else 256)

    def compiled_calls(
        self, queries_per_key: int, *, is_causal: bool
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Kinds differ in whether there are more than 256 segments, and whether the longest has one
        tile of queries and one of keys: 48 to 128 rows in backward; in forward 128 to 256 rows of
        query heads that share a key. Heads of 256 on B200 have one more, with more segments of one
        tile than half the multiprocessors.
        """
        longest = [(1, 1), (1, 512), (max(1, 256 // queries_per_key), 512), (512, 512)]
        longest.append((96, 96) if is_causal else (512, 1))
        short = ((1, 1),) * 256
        return tuple((one, *rest) for one in dict.fromkeys(longest) for rest in ((), short))

    def wrong_scores(self, major: int, head_size: int, scores: Scores) -> str | None:
        if major == 10 and head_size == 256 and (scores.softcap or scores.sliding):
            return (
                "its backward of heads of 256 has neither sliding windows nor caps "
                "(attention_softcap) on compute capability 10.x"
            )
        return None


FLASH2, FLASH3, FLASH4 = Flash2Backend(), Flash3Backend(), Flash4Backend()
FLASH_BACKENDS: tuple[FlashBackend, ...] = (FLASH2, FLASH3, FLASH4)
DETERMINISTIC_FLASH_BACKENDS = tuple(type(x)(deterministic=True) for x in FLASH_BACKENDS)
