"""Context parallelism of packed documents in transformers.

    context = ContextParallel(model, cp=2)
    loader = DataLoader(rows, batch_sampler=..., collate_fn=context.collator(PaddingFreeCollator()))
    loss = model(**batch, num_items_in_batch=labels_of_all_ranks).loss * world_size

Documents may have any lengths, and none attends to another. With transformers' Trainer or TRL,
write `balanced(SFTTrainer)(..., balance=Balance(..., cp=2))` instead.

Each batch brings a plan that says which rows this rank computes. The plan is an argument of the
decoder's forward, which passes it on to every layer. So layers that are recomputed in backward use
the plan of their micro-batch even if another micro-batch has begun since.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from wlb.adapters.versions import require

require("transformers>=5.23")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from wlb.adapters.collate.sharded import ROWS_KEY, ContextCollator, ContextRows, ContextSharder
from wlb.kernels import Scores
from wlb.kernels.fused import choose_fused
from wlb.kernels.select import select_backend
from wlb.parallel.collectives import agree
from wlb.parallel.context.attention import ContextAttention, HeadShape
from wlb.parallel.context.exchange import to_device
from wlb.plan import UserError, check_at_least
from wlb.spec import AttentionBackend, FusedKernels

NAME = "wlb_context"
"""Value of `attn_implementation`, registered in transformers' tables of attention functions."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
"""model_type of the families that are supported. Each is tested against one process."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""Entries of a config's layer_types that are supported."""
_LOCAL_ROPE = ("dynamic", "longrope")
"""RoPE types that are refused.

They depend on the largest position in the input, which differs between CP ranks."""


class RowsAttention:
    """Attention of one micro-batch on this rank, for all layers of a model.

    Layers that differ in heads, window or soft cap get a `ContextAttention` each. All of them share
    the index tensors.

    This is no dataclass, because FSDP2 with mixed precision would copy a dataclass field by field
    in every layer.

    Args:
        host: The micro-batch's plan and index arrays, on the host.
        group: CP group of this rank; None for cp = 1.
        device: Device of the model's activations.
        keep_gathered_kv: Keep the gathered keys and values for backward. Set where layers are
            recomputed, so that keys and values are gathered only once.
    """

    def __init__(
        self,
        host: ContextRows,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        keep_gathered_kv: bool,
    ) -> None:
        self.host, self.group, self.device = host, group, device
        self.keep_gathered_kv = keep_gathered_kv
        self.on_device = to_device(dict(host.rows.arrays()), device)
        self._made: dict[tuple[Any, ...], ContextAttention] = {}

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        *,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Return attention's output, shape [T, H, D].

        Scores are scaled by 1 / sqrt(D).

        Args:
            q_THD: Queries of this rank's T rows.
            k_TGD: Keys of this rank's rows.
            v_TGD: Values of this rank's rows.
            window: Keys that a query sees, itself included; None means all earlier ones.
            softcap: Soft cap of the scores; None means no cap.
        """
        # A window as long as the longest document masks nothing.
        if window is not None and window >= self.host.longest:
            window = None
        scores = Scores(sliding=window or 0, softcap=softcap or 0.0)
        heads = HeadShape(
            num_heads=q_THD.shape[1],
            num_kv_heads=k_TGD.shape[1],
            head_dim=q_THD.shape[2],
            dtype=q_THD.dtype,
        )
        key = (heads, scores)
        if key not in self._made:
            self._made[key] = ContextAttention.from_rows(
                self.host.rows,
                group=self.group,
                heads=heads,
                backend=self._backend(heads, scores),
                device=self.device,
                keep_gathered_kv=self.keep_gathered_kv,
                fused=choose_fused(FusedKernels.AUTO, device=self.device, dtype=heads.dtype).fused,
                on_device=self.on_device,
                scores=scores,
            )
        return self._made[key](q_THD, k_TGD, v_TGD)

    def _backend(self, heads: HeadShape, scores: Scores) -> str:
        return select_backend(
            AttentionBackend.AUTO,
            device=self.device,
            dtype=heads.dtype,
            head_size=heads.head_dim,
            scores=scores,
        )


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    wlb_context: RowsAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function with transformers' signature.

    Without a plan, in evaluation and generation, it computes what the model computes on one
    process.

    Args:
        module: The attention layer.
        query: Shape [1, H, T, D].
        key: Shape [1, G, T, D].
        value: Shape [1, G, T, D].
        attention_mask: Used only without a plan.
        scaling: Factor of the scores; None means 1 / sqrt(D).
        dropout: Must be 0 with a plan.
        sliding_window: Keys that a query sees; None means all earlier ones.
        softcap: Soft cap of the scores, or None.
        wlb_context: This micro-batch's attention over the CP group; None without a plan.
        **kwargs: Further arguments of transformers.

    Returns:
        The output, shape [1, T, H, D], and None in place of attention weights.
    """
    if wlb_context is None:
        plain = sdpa_attention_forward if softcap is None else _eager_attention(module)
        given = {"scaling": scaling, "dropout": dropout, **kwargs}
        if softcap is not None:
            given["softcap"] = softcap
        return plain(module, query, key, value, attention_mask, **given)
    if dropout or kwargs.get("output_attentions"):
        unsupported = (
            "output_attentions" if kwargs.get("output_attentions") else f"dropout = {dropout}"
        )
        raise UserError(f"attention with {unsupported} is not computed over CP ranks; leave it off")
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UserError(
                f"{type(module).__name__} adds {name} to attention, which is not covered"
            )
    dtype = value.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1).to(dtype).contiguous() for x in (query, key, value))
    head_dim = query.shape[-1]
    # The kernels scale by 1 / sqrt(D), so put any other scale into the queries.
    if scaling is not None and scaling != head_dim**-0.5:
        q_THD = q_THD * (scaling * head_dim**0.5)
    out = wlb_context.attend(q_THD, k_TGD, v_TGD, window=sliding_window, softcap=softcap)
    return out[None], None


def context_mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """Return the mask of a forward without a plan, as sdpa or eager attention (soft cap) wants it.

    A forward with a plan does not call this, because `ContextParallel` passes a ready-made mask.
    """
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return eager_mask(*args, config=config, **kwargs)
    return sdpa_mask(*args, config=config, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(NAME, context_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, context_mask)


class ContextParallel:
    """Makes a transformers model attend over CP groups of consecutive ranks in training.

    Creating it is a collective call: all ranks do it for the same model. Batches made by `collator`
    (or by a `ContextSharder`) bring their plan. A batch without a plan is computed by each rank
    alone, which is for evaluation and generation; in training it raises UserError. The ranks of a
    group must get the same documents, which is checked for the first micro-batch.

    The loss of a rank is the sum over the labels of its rows, and gradients of K and V are added up
    over the group. So the gradient of a parameter is the sum over all dp x cp ranks. DDP and FSDP
    compute the average instead. Therefore divide by the labels of all ranks (each rank counts its
    `shift_labels`) and multiply by the number of ranks, as transformers' Trainer does.

    Layers with a sliding window exchange the keys of whole documents, like all other layers.

    Args:
        model: The model. A model that is not supported raises UserError, and so does a window or a
            soft cap that no kernel here computes.
        cp: Ranks that share a micro-batch.
        **options: Further fields of `ContextSharder`.
    """

    def __init__(self, model: Any, *, cp: int, **options: Any) -> None:
        check_model(model)
        self.group, self.rank = context_group(cp)
        self.sharder = ContextSharder(cp=cp, rank=self.rank, **options)
        self.model, self._was = model, model.config._attn_implementation
        self._has_compared = False
        decoder: nn.Module = model.get_decoder()
        model.set_attn_implementation(NAME)
        # Hook the decoder, because some wrappers (PEFT, TRL's fused head) skip the model's forward.
        self._hook = decoder.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)

    def collator(self, collator: Callable[[Any], Any]) -> ContextCollator:
        """Return a collator that cuts each batch of a padding-free collator for this rank."""
        return ContextCollator(collator=collator, sharder=self.sharder)

    def close(self) -> None:
        """Restore the model."""
        self._hook.remove()
        self.model.set_attn_implementation(self._was)

    def _before(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Replace the batch's plan by a `RowsAttention`, once per micro-batch."""
        host = kwargs.get(ROWS_KEY)
        if host is None:
            if decoder.training and torch.is_grad_enabled():
                raise UserError(
                    f"a training batch came without {ROWS_KEY}, its plan over CP ranks; make "
                    f"batches by ContextParallel.collator, or call model.eval()"
                )
            kwargs.pop(ROWS_KEY, None)
            return args, kwargs
        tokens = args[0] if args else kwargs.get("input_ids")
        if tokens is None:
            tokens = kwargs["inputs_embeds"]
        self._check(host, tokens, kwargs)
        attention = RowsAttention(
            host,
            group=self.group,
            device=tokens.device,
            keep_gathered_kv=decoder.training and _is_recomputed(decoder),
        )
        # transformers uses a mask with four axes as it is. An empty one keeps it from making a mask
        # of T x T values.
        mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=tokens.device)
        return args, kwargs | {ROWS_KEY: attention, "attention_mask": mask, "use_cache": False}

    def _check(self, host: ContextRows, tokens: Tensor, kwargs: dict[str, Any]) -> None:
        """Raise UserError for a batch that does not fit this rank, its plan or its group."""
        if not self._has_compared:
            self._has_compared = True
            agree({"documents of the micro-batch": host.documents}, None, group=self.group)
        if kwargs.get("attention_mask") is not None:
            raise UserError(
                "the model got an attention_mask and a plan; leave the mask out, documents are "
                "kept apart by the plan"
            )
        if kwargs.get("position_ids") is None:
            raise UserError("the model got a plan without position_ids; pass the batch as it came")
        num_rows, sharder = host.rows.positions.size, self.sharder
        if (host.plan.cp, host.rank) != (sharder.cp, sharder.rank):
            raise UserError(
                f"the batch was cut for rank {host.rank} of {host.plan.cp}, this is rank "
                f"{sharder.rank} of {sharder.cp}; use this rank's ContextParallel.collator"
            )
        if tuple(tokens.shape[:2]) != (1, num_rows):
            raise UserError(
                f"input_ids have shape {tuple(tokens.shape)}, the plan has [1, {num_rows}]; pass "
                f"the batch as it came"
            )


def context_group(cp: int) -> tuple[dist.ProcessGroup | None, int]:
    """Return this rank's CP group of `cp` consecutive ranks, and its place in it.

    This is a collective call. The group is None for cp = 1.
    """
    check_at_least("cp", cp, 1)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks % cp:
        raise UserError(
            f"cp = {cp} does not divide the number of processes, {num_ranks}; start a multiple of "
            f"cp (torchrun --nproc-per-node), or choose another cp"
        )
    if cp == 1:
        return None, 0
    # Every rank must take part in making every group.
    mine, rank = None, dist.get_rank()
    for first in range(0, num_ranks, cp):
        group = dist.new_group(list(range(first, first + cp)))
        if isinstance(group, dist.ProcessGroup) and first <= rank < first + cp:
            mine = group
    return mine, rank % cp


def context_of_trainer(trainer: Any, *, cp: int, **options: Any) -> ContextParallel:
    """Set up context parallelism for the model of a transformers Trainer, before training.

    Args:
        trainer: The Trainer.
        cp: Ranks that share a micro-batch.
        **options: Further fields of `ContextSharder`.

    Raises:
        UserError: A setting of the Trainer is not supported with context parallelism.
    """
    args = trainer.args
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    found = {
        f"accelerate's {name} = {getattr(parallel, name)}": f"leave {name} at 1"
        for name in ("tp_size", "cp_size", "sp_size")
        if parallel is not None and getattr(parallel, name) > 1
    }
    if trainer.get_tp_size() > 1:
        found[f"tensor parallelism of {trainer.get_tp_size()}"] = "load the model without it"
    if not args.average_tokens_across_devices or not trainer.model_accepts_loss_kwargs:
        found["a loss that is divided by each rank's labels"] = (
            "set average_tokens_across_devices=True, with a model that takes num_items_in_batch"
        )
    if args.label_smoothing_factor:
        found[f"label_smoothing_factor = {args.label_smoothing_factor}"] = "set it to 0"
    if trainer.compute_loss_func is not None:
        found["compute_loss_func, which would shift labels after the cut"] = "leave it out"
    for name in ("use_liger_kernel", "torch_compile"):
        if getattr(args, name, False):
            found[f"{name}, which is not tested"] = f"set {name}=False"
    for problem, remedy in found.items():
        raise UserError(f"Balance's cp = {cp} does not go with {problem}; {remedy}")
    return ContextParallel(trainer.model, cp=cp, **options)


def check_model(model: Any) -> None:
    """Raise UserError for a model whose attention CP ranks cannot compute."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise UserError(f"{type(model).__name__} is not a transformers model with a decoder")
    name = f"{type(model).__name__} (model_type {config.model_type!r})"
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{name} is not one of the families that context parallelism supports "
            f"({', '.join(FAMILIES)}); train it with cp = 1"
        )
    for problem, remedy in _problems(config):
        raise UserError(f"{name} has {problem}, which is not computed over CP ranks; {remedy}")


def _problems(config: Any) -> Iterable[tuple[str, str]]:
    """Yield each unsupported property of a config, with its remedy."""
    one = "train it with cp = 1"
    if getattr(config, "attention_dropout", 0):
        yield f"attention_dropout = {config.attention_dropout}", "set it to 0 in its config"
    if not getattr(config, "is_causal", True) or getattr(
        config, "use_bidirectional_attention", None
    ):
        yield "attention that is not causal", one
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            yield f"layers of {kind}", one
    rope = getattr(config, "rope_parameters", None) or {}
    for values in (rope, *rope.values()):
        if isinstance(values, dict) and values.get("rope_type") in _LOCAL_ROPE:
            yield f"RoPE of type {values['rope_type']}", f"choose another rope_type, or {one}"


def _is_recomputed(decoder: nn.Module) -> bool:
    """Return whether backward recomputes layers: transformers marks each such layer."""
    return any(getattr(module, "gradient_checkpointing", False) for module in decoder.modules())


def _eager_attention(module: nn.Module) -> Callable[..., Any]:
    """Return the eager attention of the module's file, because sdpa has no soft cap."""
    return sys.modules[type(module).__module__].eager_attention_forward
