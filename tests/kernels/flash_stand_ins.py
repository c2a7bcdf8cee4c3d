"""Replaces the functions of the three FlashAttention packages that wlb calls.

The parameters have the names, order and defaults of flash-attn 2.8.3, flash-attn-3 3.0.0 and
flash-attn-4 4.0.0b36; for the last two, some parameters that wlb never passes are left out. Each
function records its arguments in CALLS and computes with the reference.
"""

from typing import Any

import torch
from torch import Tensor

from wlb.kernels.op import SavedTensors
from wlb.kernels.reference import REFERENCE
from wlb.kernels.segments import Scores, Segments

CALLS: list[dict[str, Any]] = []


def segments_of(arguments: dict[str, Any]) -> Segments:
    """Returns the segments of a call, with the sliding window and the softcap of its arguments."""
    left, right = arguments["window_size_left"], arguments["window_size_right"]
    slides = left not in (None, -1)
    assert right == (0 if slides else left)
    return Segments.from_offsets(
        arguments["cu_seqlens_q"].tolist(),
        arguments["cu_seqlens_k"].tolist(),
        device="cpu",
        scores=Scores(sliding=left + 1 if slides else 0, softcap=arguments.get("softcap") or 0.0),
    )


def keep(arguments: dict[str, Any]) -> Segments:
    CALLS.append(arguments)
    return segments_of(arguments)


def gradients(arguments: dict[str, Any], lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    segments = keep(arguments)
    tensors = [arguments[name] for name in ("dout", "q", "k", "v", "out")]
    dout, *saved = tensors
    return REFERENCE.backward(dout, SavedTensors(*saved, lse), segments)


# flash-attn 2.8.3: torch custom ops.


@torch.library.custom_op("wlb_test_flash2::forward", mutates_args=())
def flash2_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse = REFERENCE.forward(q, k, v, keep(dict(locals())))
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


@torch.library.custom_op("wlb_test_flash2::backward", mutates_args=("dq", "dk", "dv"))
def flash2_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    assert dq is not None
    assert dk is not None
    assert dv is not None
    found = gradients(dict(locals()), softmax_lse)
    for to, value in zip((dq, dk, dv), found, strict=True):
        to.copy_(value)
    return torch.empty(0)


# flash-attn-3 3.0.0: torch custom ops. Parameters that wlb never passes come last here.


@torch.library.custom_op("wlb_test_flash3::forward", mutates_args=())
def flash3_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse = REFERENCE.forward(q, k, v, keep(dict(locals())))
    return out, lse, torch.empty(0), torch.empty(0)


@torch.library.custom_op("wlb_test_flash3::backward", mutates_args=("dq", "dk", "dv"))
def flash3_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    assert dq is not None
    assert dk is not None
    assert dv is not None
    found = gradients(dict(locals()), softmax_lse)
    for to, value in zip((dq, dk, dv), found, strict=True):
        to.copy_(value)
    return torch.empty(0)


# flash-attn-4 4.0.0b36: plain functions.


def flash4_forward(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
    return_lse=False,
):
    out, lse = REFERENCE.forward(q, k, v, keep(dict(locals())))
    return out, lse if return_lse else None, None, None, None


def flash4_backward(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    window_size_left=None,
    window_size_right=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    deterministic=False,
):
    return gradients(dict(locals()), lse)


STAND_INS = {
    "2": (
        "flash_attn.flash_attn_interface",
        {
            "_flash_attn_varlen_forward": flash2_forward,
            "_flash_attn_varlen_backward": flash2_backward,
        },
    ),
    "3": (
        "flash_attn_interface",
        {"_flash_attn_forward": flash3_forward, "_flash_attn_backward": flash3_backward},
    ),
    "4": (
        "flash_attn.cute.interface",
        {"_flash_attn_fwd": flash4_forward, "_flash_attn_bwd": flash4_backward},
    ),
}
