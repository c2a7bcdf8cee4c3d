"""Attention by FlashAttention-4 (package flash-attn-4), for Hopper and Blackwell.

float16 and bfloat16; heads in steps of 8, on Hopper up to 256, on Blackwell up to 128, or 256. The
first call for a shape of heads compiles kernels for some seconds. Signatures were read in 4.0.0b36
(all releases so far are pre-releases; flash-attn 2.8.3 brings an older copy of the module, which is
refused) and are tested with a stand-in; **never run on a GPU**. Shapes: T query rows, S key rows, H
query heads, G key/value heads, D head size.
"""

from typing import Any

from torch import Tensor

from wlb.kernels.flash_package import FlashBackend, FlashPackage, common_arguments, wrong_head_size
from wlb.kernels.segments import Segments

_BLACKWELL = 10
_SHARED = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *("softmax_scale", "causal", "window_size_left", "window_size_right"),
)


class Flash4Backend(FlashBackend):
    name = "flash_attention_4"
    package = FlashPackage(
        distribution="flash-attn-4",
        module="flash_attn.cute.interface",
        supported="flash-attn-4 4.0.0b36",
        install="pip install --pre flash-attn-4",
        passed={
            "_flash_attn_fwd": (*_SHARED, "return_lse"),
            "_flash_attn_bwd": (*_SHARED, "out", "dout", "lse", "deterministic"),
        },
    )

    def wrong_device(self, major: int, minor: int, head_size: int) -> str | None:
        if major not in (9, _BLACKWELL):
            return f"compute capability 9.x or 10.x only, not {major}.{minor}"
        if major == _BLACKWELL and head_size != 256:
            return wrong_head_size(head_size, 128)
        return wrong_head_size(head_size, 256)

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        out_THD, lse_HT, *_ = self.kernels["_flash_attn_fwd"](
            q=q_THD, k=k_SGD, v=v_SGD, **_arguments(q_THD, segments), return_lse=True
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
        dq_THD, dk_SGD, dv_SGD = self.kernels["_flash_attn_bwd"](
            q=q_THD,
            k=k_SGD,
            v=v_SGD,
            out=out_THD,
            dout=grad_THD,
            lse=lse_HT,
            **_arguments(q_THD, segments),
            deterministic=self.deterministic,
        )
        return dq_THD, dk_SGD, dv_SGD


def _arguments(q_THD: Tensor, segments: Segments) -> dict[str, Any]:
    return {
        **common_arguments(q_THD, segments),
        "causal": True,
        "window_size_left": None,  # None means no window here; the other packages take -1.
        "window_size_right": None,
    }


FLASH4 = Flash4Backend()
