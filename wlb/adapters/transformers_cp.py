"""Context parallelism of packed documents for models of Hugging Face transformers.

    context = ContextParallel(model, cp=2)
    loader = DataLoader(rows, batch_sampler=..., collate_fn=context.collator(PaddingFreeCollator()))
    loss = model(**batch, num_items_in_batch=labels_of_all_ranks).loss * world_size

Documents may have any lengths, and no document attends to another. With transformers' Trainer or
TRL, write `balanced(SFTTrainer)(..., balance=Balance(..., cp=2))` instead.

Each batch contains a plan that says which tokens this rank computes. The plan is an argument of the
decoder's forward, which passes it on to every layer. So a layer that is recomputed in backward uses
the plan of its own micro-batch, even if another micro-batch has begun in the meantime.
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
"""Name of wlb's attention function in transformers, a value of `attn_implementation`."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
"""Supported values of a config's model_type.

Tests compare each family on several CP ranks with the same model on one process."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""Entries of a config's layer_types that are supported."""
_LOCAL_ROPE = ("dynamic", "longrope")
"""RoPE types that are not supported.

They depend on the largest position in a rank's input, and CP ranks have different positions."""


class RowsAttention:
    """Computes the attention of all layers of a model for one micro-batch on one CP rank.

    Layers with equal heads, window and soft cap share a `ContextAttention`. All layers share the
    index tensors that say which keys and values the CP ranks exchange.

    This is not a dataclass, because FSDP2 with mixed precision would copy a dataclass field by
    field in every layer.

    Args:
        host: The micro-batch's sharding plan and its index arrays, in CPU memory.
        group: CP group of this rank; None if cp = 1.
        device: Device of the model's activations.
        keep_gathered_kv: Whether to keep the gathered keys and values for backward. With activation
            recomputation this saves gathering them twice.
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
        """Return the attention output of this rank's tokens, shape [T, H, D].

        Scores are scaled by 1 / sqrt(D). T counts this rank's tokens, with padding.

        Args:
            q_THD: Queries of this rank's tokens, H heads of size D.
            k_TGD: Keys of this rank's tokens, G key-value heads.
            v_TGD: Values of this rank's tokens.
            window: Number of latest keys that a query attends to, including its own token's; None
                means all keys up to its own.
            softcap: Soft cap of the scores; None means no cap.
        """
        # A window that is as long as the longest document excludes no key, so use plain attention.
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
    """Compute attention over the CP group; this is the function that transformers' layers call.

    In evaluation and generation `wlb_context` is None, and the result is the usual attention over
    this process's tokens alone.

    Args:
        module: The attention layer.
        query: Queries of this rank's tokens, shape [1, H, T, D].
        key: Keys of this rank's tokens, shape [1, G, T, D].
        value: Values of this rank's tokens, shape [1, G, T, D].
        attention_mask: Used only if `wlb_context` is None.
        scaling: Factor of the scores; None means 1 / sqrt(D).
        dropout: Must be 0 unless `wlb_context` is None.
        sliding_window: Number of latest keys that a query attends to, including its own token's;
            None means all keys up to its own.
        softcap: Soft cap of the scores, or None.
        wlb_context: Computes this micro-batch's attention over the CP group; None in evaluation and
            generation.
        **kwargs: Further arguments that transformers passes to attention functions.

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
        unsupported, remedy = (
            ("output_attentions = True", "output_attentions = False")
            if kwargs.get("output_attentions")
            else (f"dropout = {dropout}", "the model's dropout of attention to 0")
        )
        raise UserError(
            f"attention with {unsupported} is not supported with context parallelism; set {remedy}"
        )
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UserError(
                f"{type(module).__name__} passes {name} to attention, which is not supported with "
                "context parallelism; train the model with cp = 1"
            )
    dtype = value.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1).to(dtype).contiguous() for x in (query, key, value))
    head_dim = query.shape[-1]
    # The kernels always scale scores by 1 / sqrt(D). For another scale, multiply the queries by the
    # ratio of both.
    if scaling is not None and scaling != head_dim**-0.5:
        q_THD = q_THD * (scaling * head_dim**0.5)
    out = wlb_context.attend(q_THD, k_TGD, v_TGD, window=sliding_window, softcap=softcap)
    return out[None], None


def context_mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """Return the attention mask for evaluation and generation; transformers calls this.

    If the model has a soft cap, the mask is made for eager attention, otherwise for SDPA. In
    training over CP ranks transformers does not call this function, because `ContextParallel`
    passes a ready-made mask.

    Args:
        *args: transformers' arguments of mask functions.
        config: The model's configuration.
        **kwargs: transformers' arguments of mask functions.
    """
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return eager_mask(*args, config=config, **kwargs)
    return sdpa_mask(*args, config=config, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(NAME, context_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, context_mask)


class ContextParallel:
    """Makes a transformers model compute attention over groups of CP ranks in training.

    A group consists of `cp` consecutive ranks. All ranks must create this object at the same time,
    for the same model. Batches made by `collator` (or by a `ContextSharder`) contain a plan, which
    says which tokens each rank computes. A batch without a plan is computed by each rank alone,
    which is meant for evaluation and generation; in training it raises UserError. The ranks of a
    group must get the same documents, which is checked for the first micro-batch.

    How to scale the loss: a rank's loss is the sum over the labels of its tokens, so the gradient
    of a parameter should be the sum over all dp x cp ranks. DDP and FSDP compute the average
    instead. Therefore divide the loss by the number of labels on all ranks (each rank counts its
    `shift_labels`) and multiply it by the number of ranks, as transformers' Trainer does.

    Layers with a sliding window exchange the keys of whole documents, although they need fewer.

    Args:
        model: The model. UserError is raised if it is not supported, or if no attention kernel on
            this machine supports its window or soft cap.
        cp: Number of ranks that share a micro-batch.
        **options: Fields of `ContextSharder`, such as `strategy`.
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
        """Return a collator that keeps only this rank's tokens of each batch.

        Args:
            collator: Makes padding-free batches for the whole CP group (`PaddingFreeCollator`).
        """
        return ContextCollator(collator=collator, sharder=self.sharder)

    def close(self) -> None:
        """Restore the model's own attention and remove the hook on its decoder."""
        self._hook.remove()
        self.model.set_attn_implementation(self._was)

    def _before(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Replace the plan in the arguments of the decoder's forward by a `RowsAttention`.

        torch calls this hook before the decoder's forward. In evaluation, a batch need not have a
        plan; its arguments are returned unchanged.

        Raises:
            UserError: A training batch has no plan, or does not fit its plan.
        """
        host = kwargs.get(ROWS_KEY)
        if host is None:
            if decoder.training and torch.is_grad_enabled():
                raise UserError(
                    f"a training batch has no {ROWS_KEY}, which says which tokens each CP rank "
                    "computes; make batches with ContextParallel.collator, or call model.eval() "
                    "for evaluation"
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
        # Pass an empty mask with four axes. transformers uses such a mask unchanged
        # instead of building a mask of T x T values.
        mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=tokens.device)
        return args, kwargs | {ROWS_KEY: attention, "attention_mask": mask, "use_cache": False}

    def _check(self, host: ContextRows, tokens: Tensor, kwargs: dict[str, Any]) -> None:
        """Raise UserError unless the collator made the batch for this rank and nobody changed it.

        For the first micro-batch, also check that all ranks of the CP group got the same documents.

        Args:
            host: The batch's plan.
            tokens: The batch's input_ids or inputs_embeds, shape [1, T, ...].
            kwargs: Keyword arguments of the decoder's forward.
        """
        if not self._has_compared:
            self._has_compared = True
            agree({"documents of the micro-batch": host.documents}, None, group=self.group)
        if kwargs.get("attention_mask") is not None:
            raise UserError(
                f"the model got an attention_mask together with {ROWS_KEY}, which already keeps "
                "documents apart; remove the attention_mask"
            )
        if kwargs.get("position_ids") is None:
            raise UserError(
                f"the model got {ROWS_KEY} without position_ids; pass the batch to the model "
                "unchanged"
            )
        num_rows, sharder = host.rows.positions.size, self.sharder
        if (host.plan.cp, host.rank) != (sharder.cp, sharder.rank):
            raise UserError(
                f"the batch was made for CP rank {host.rank} of {host.plan.cp}, but this is CP "
                f"rank {sharder.rank} of {sharder.cp}; use the ContextParallel.collator of this "
                "rank"
            )
        if tuple(tokens.shape[:2]) != (1, num_rows):
            raise UserError(
                f"input_ids have shape {tuple(tokens.shape)}, but the batch's plan expects [1, "
                f"{num_rows}]; pass the batch to the model unchanged"
            )


def context_group(cp: int) -> tuple[dist.ProcessGroup | None, int]:
    """Create CP groups of `cp` consecutive ranks; return this rank's group and its rank in it.

    All ranks must call this together. For cp = 1, the group is None and the rank 0.
    """
    check_at_least("cp", cp, 1)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks % cp:
        raise UserError(
            f"cp = {cp} must divide the number of processes, which is {num_ranks}; start a "
            "multiple of cp processes (torchrun --nproc-per-node), or set another cp"
        )
    if cp == 1:
        return None, 0
    # torch requires that every rank calls new_group for every group, also for groups of others.
    mine, rank = None, dist.get_rank()
    for first in range(0, num_ranks, cp):
        group = dist.new_group(list(range(first, first + cp)))
        if isinstance(group, dist.ProcessGroup) and first <= rank < first + cp:
            mine = group
    return mine, rank % cp


def context_of_trainer(trainer: Any, *, cp: int, **options: Any) -> ContextParallel:
    """Set up context parallelism for the model of a transformers Trainer; call it before training.

    Args:
        trainer: The Trainer.
        cp: Number of ranks that share a micro-batch.
        **options: Fields of `ContextSharder`, such as `strategy`.

    Raises:
        UserError: A setting of the Trainer is not supported with context parallelism.
    """
    args = trainer.args
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    found = {
        f"accelerate's {name} = {getattr(parallel, name)}": f"set {name} = 1"
        for name in ("tp_size", "cp_size", "sp_size")
        if parallel is not None and getattr(parallel, name) > 1
    }
    if trainer.get_tp_size() > 1:
        found[f"tensor parallelism of {trainer.get_tp_size()}"] = (
            "load the model without tensor parallelism"
        )
    if not args.average_tokens_across_devices or not trainer.model_accepts_loss_kwargs:
        found["a loss that is divided by each rank's labels"] = (
            "set average_tokens_across_devices=True, with a model that takes num_items_in_batch"
        )
    if args.label_smoothing_factor:
        found[f"label_smoothing_factor = {args.label_smoothing_factor}"] = (
            "set label_smoothing_factor = 0"
        )
    if trainer.compute_loss_func is not None:
        found["compute_loss_func, which would shift labels within one rank's tokens"] = (
            "give no compute_loss_func"
        )
    for name in ("use_liger_kernel", "torch_compile"):
        if getattr(args, name, False):
            found[f"{name}, which is not tested"] = f"set {name}=False"
    for problem, remedy in found.items():
        raise UserError(f"cp = {cp} of Balance does not work with {problem}; {remedy}")
    return ContextParallel(trainer.model, cp=cp, **options)


def check_model(model: Any) -> None:
    """Raise UserError for a model that is not supported with context parallelism."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise UserError(
            f"{type(model).__name__} is not a transformers model with a decoder (get_decoder); "
            "give a causal language model of transformers"
        )
    name = f"{type(model).__name__} (model_type {config.model_type!r})"
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{name} is not supported with context parallelism; set cp = 1, or use a model whose "
            f"model_type is one of {', '.join(FAMILIES)}"
        )
    for problem, remedy in _problems(config):
        raise UserError(
            f"{name} has {problem}, which is not supported with context parallelism; {remedy}"
        )


def _problems(config: Any) -> Iterable[tuple[str, str]]:
    """Yield each property of a model's config that CP does not support, and what to do about it."""
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
    """Return whether backward recomputes activations (transformers' gradient_checkpointing)."""
    return any(getattr(module, "gradient_checkpointing", False) for module in decoder.modules())


def _eager_attention(module: nn.Module) -> Callable[..., Any]:
    """Return `eager_attention_forward` of the model family, for soft caps, which SDPA lacks.

    Args:
        module: An attention layer. The Python file of its class also defines the function.
    """
    return sys.modules[type(module).__module__].eager_attention_forward
