"""Attention by the package flash-attn (FlashAttention-2), for GPUs from Ampere on.

The kernels that torch_varlen uses inside torch, in the package's own build: float16 and bfloat16,
heads up to 256 in steps of 8. Signatures were read in the source of 2.8.3 and are tested with a
stand-in; **never run on a GPU**. The deterministic backward keeps ceil(SMs / (segments * heads))
float32 copies of dQ: with 132 SMs, one segment of 131,072 tokens and 32 heads of 128, five copies
of 2.1 GB. Shapes: T query rows, S key rows, H query heads, G key/value heads, D head size.
"""

from typing import Any

from torch import Tensor

from wlb.kernels.flash_package import (
    FlashBackend,
    FlashPackage,
    before_ampere,
    common_arguments,
    wrong_head_size,
)
from wlb.kernels.segments import Segments

_SHARED = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_OPTIONS = (
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size_left",
    "window_size_right",
    "softcap",
    "alibi_slopes",
)


class Flash2Backend(FlashBackend):
    name = "flash_attention_2"
    package = FlashPackage(
        distribution="flash-attn",
        module="flash_attn.flash_attn_interface",
        supported="flash-attn 2.8.3",
        install="pip install flash-attn==2.8.3 --no-build-isolation, with nvcc",
        passed={
            "_flash_attn_varlen_forward": (*_SHARED, *_OPTIONS, "return_softmax"),
            "_flash_attn_varlen_backward": (
                *_SHARED,
                *_OPTIONS,
                *("dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic"),
            ),
        },
    )

    def wrong_device(self, major: int, minor: int, head_size: int) -> str | None:
        return before_ampere(major, minor) or wrong_head_size(head_size, 256)

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        out_THD, lse_HT, _, _ = self.kernels["_flash_attn_varlen_forward"](
            q=q_THD, k=k_SGD, v=v_SGD, **_arguments(q_THD, segments), return_softmax=False
        )
        return out_THD, lse_HT

    def backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_SGD: Tensor,
        v_SGD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        segments: Segments,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.backward_into(
            "_flash_attn_varlen_backward",
            {"dout": grad_THD, "out": out_THD, "softmax_lse": lse_HT},
            (q_THD, k_SGD, v_SGD),
            **_arguments(q_THD, segments),
        )


def _arguments(q_THD: Tensor, segments: Segments) -> dict[str, Any]:
    return {
        **common_arguments(q_THD, segments),
        # With a maximum of 1 and grouped heads the package assumes decoding, with exactly one query
        # in every segment, but ours may have none. A larger maximum only changes the launch size.
        "max_seqlen_q": max(2, segments.max_q),
        "dropout_p": 0.0,
        "causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


FLASH2 = Flash2Backend()
