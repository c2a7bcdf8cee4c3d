"""Attention by FlashAttention-3 (package flash-attn-3, module flash_attn_interface), for Hopper.

float16 and bfloat16; heads up to 256 in steps of 8, or up to 192 with the deterministic backward.
Signatures were read in version 3.0.0 (folder hopper of the flash-attention repository, February to
August 2026; betas before autumn 2025 differ and are refused) and are tested with a stand-in;
**never run on a GPU**. The package's Ampere kernels are not offered. Shapes: T query rows, S key
rows, H query heads, G key/value heads, D head size.
"""

from typing import Any

from torch import Tensor

from wlb.kernels.flash_package import FlashBackend, FlashPackage, common_arguments, wrong_head_size
from wlb.kernels.segments import Segments

_SHARED = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *("softmax_scale", "window_size_left", "window_size_right", "softcap"),
)


class Flash3Backend(FlashBackend):
    name = "flash_attention_3"
    package = FlashPackage(
        distribution="flash-attn-3",
        module="flash_attn_interface",
        supported="flash-attn-3 3.0.0",
        install="built from the folder hopper of the flash-attention repository",
        passed={
            "_flash_attn_forward": (*_SHARED, "causal", "num_splits"),
            "_flash_attn_backward": (
                *_SHARED,
                *("dout", "out", "softmax_lse", "dq", "dk", "dv", "is_causal", "deterministic"),
            ),
        },
    )

    def wrong_device(self, major: int, minor: int, head_size: int) -> str | None:
        if major != 9:
            return f"compute capability 9.x (Hopper) only, not {major}.{minor}"
        return wrong_head_size(head_size, 192 if self.deterministic else 256)

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        # More splits are for decoding, and every number of splits rounds differently.
        out_THD, lse_HT, *_ = self.kernels["_flash_attn_forward"](
            q=q_THD, k=k_SGD, v=v_SGD, **_arguments(q_THD, segments), causal=True, num_splits=1
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
            "_flash_attn_backward",
            {"dout": grad_THD, "out": out_THD, "softmax_lse": lse_HT},
            (q_THD, k_SGD, v_SGD),
            **_arguments(q_THD, segments),
            is_causal=True,
        )


def _arguments(q_THD: Tensor, segments: Segments) -> dict[str, Any]:
    return {
        **common_arguments(q_THD, segments),
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
    }


FLASH3 = Flash3Backend()
