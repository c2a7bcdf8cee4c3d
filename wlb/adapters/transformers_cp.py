"""Context parallelism of packed documents in transformers: any lengths, none sees another.

    context = ContextParallel(model, cp=2)
    loader = DataLoader(rows, batch_sampler=..., collate_fn=context.collator(PaddingFreeCollator()))
    loss = model(**batch, num_items_in_batch=labels_of_all_ranks).loss * world_size

TRL, transformers' Trainer: `balanced(SFTTrainer)(..., balance=Balance(..., cp=2))`. A batch's plan
is an argument of forward that layers pass on: recomputed ones see their own micro-batch's.
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
"""Of `attn_implementation`, in `ALL_ATTENTION_FUNCTIONS` and `ALL_MASK_ATTENTION_FUNCTIONS`."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
"""model_type of the families whose attention is that of `wlb.parallel.context`; tested each."""
LAYER_TYPES = ("full_attention", "sliding_attention")
_LOCAL_ROPE = ("dynamic", "longrope")
"""Kinds of RoPE that look for the longest position of the rows that a rank holds."""


class RowsAttention:
    """Attention of one micro-batch on this rank, for all layers of a model.

    Layers of different heads, windows or caps have a `ContextAttention` each, which share their
    index tensors. keep_gathered_kv: layers are recomputed in backward, which then gathers once. No
    dataclass: FSDP2 with mixed precision would copy one field by field in every layer.
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
        """Output [T, H, D]; scores are scaled by 1 / sqrt(D)."""
        # A window that reaches every document's begin changes nothing.
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
    """Transformers' attention function: query [1, H, T, D], key and value [1, G, T, D] to output
    [1, T, H, D]. Without `wlb_context` (evaluation, generation) what the model does on one process.
    """
    if wlb_context is None:
        plain = sdpa_attention_forward if softcap is None else _eager_attention(module)
        given = {"scaling": scaling, "dropout": dropout, **kwargs}
        if softcap is not None:
            given["softcap"] = softcap
        return plain(module, query, key, value, attention_mask, **given)
    if dropout or kwargs.get("output_attentions"):
        asked = "output_attentions" if kwargs.get("output_attentions") else f"dropout = {dropout}"
        raise UserError(f"attention with {asked} is not computed over CP ranks; leave it off")
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UserError(
                f"{type(module).__name__} adds {name} to attention, which is not covered"
            )
    wanted = value.dtype
    if torch.is_autocast_enabled(query.device.type):
        wanted = torch.get_autocast_dtype(query.device.type)
    q_THD, k_TGD, v_TGD = (
        x[0].transpose(0, 1).to(wanted).contiguous() for x in (query, key, value)
    )
    head_dim = query.shape[-1]
    if scaling is not None and scaling != head_dim**-0.5:
        q_THD = q_THD * (scaling * head_dim**0.5)
    out = wlb_context.attend(q_THD, k_TGD, v_TGD, window=sliding_window, softcap=softcap)
    return out[None], None


def context_mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """The mask of a forward without a plan: sdpa's, or eager's for a model with a soft cap. Forward
    with a plan never asks for one, as `ContextParallel` hands over a mask that is made already.
    """
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return eager_mask(*args, config=config, **kwargs)
    return sdpa_mask(*args, config=config, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(NAME, context_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, context_mask)


class ContextParallel:
    """Makes a transformers model attend over CP groups of `cp` consecutive ranks, in training.

    A collective call: all ranks make one for the same model. Batches of `collator` (or of a
    `ContextSharder`) bring their plan; without one, in evaluation and generation, each rank
    computes its own batch. In training a batch without a plan is a UserError. Ranks of a group must
    get the same documents; the first micro-batch is compared.

    Loss: a rank's is the sum over its own rows' labels, and gradients of K and V are added over
    the group, so parameters' gradients are to be summed over all ranks, dp x cp. DDP and FSDP
    average over them: divide by the labels of all ranks (each rank counts its own `shift_labels`)
    and multiply by the number of ranks. That is what transformers' Trainer does.

    options: of `ContextSharder`. Layers with a sliding window get the rows of whole documents, as
    others do. UserError for a model that is not covered, by its name, and for a window or a soft
    cap that no kernel here computes.
    """

    def __init__(self, model: Any, *, cp: int, **options: Any) -> None:
        check_model(model)
        self.group, self.rank = context_group(cp)
        self.sharder = ContextSharder(cp=cp, rank=self.rank, **options)
        self.model, self._was = model, model.config._attn_implementation
        self._is_compared = False
        decoder: nn.Module = model.get_decoder()
        model.set_attn_implementation(NAME)
        # The decoder's, since wrappers (PEFT, TRL's fused head) call the outer forward by itself.
        self._hook = decoder.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)

    def collator(self, collator: Callable[[Any], Any]) -> ContextCollator:
        """A padding-free collator with this rank's cut of each batch."""
        return ContextCollator(collator=collator, sharder=self.sharder)

    def close(self) -> None:
        """Gives the model back as it was."""
        self._hook.remove()
        self.model.set_attn_implementation(self._was)

    def _before(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Turns the batch's plan into attention, once a micro-batch."""
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
        # transformers returns a mask of four axes as it is, so that it makes none of T x T values.
        mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=tokens.device)
        return args, kwargs | {ROWS_KEY: attention, "attention_mask": mask, "use_cache": False}

    def _check(self, host: ContextRows, tokens: Tensor, kwargs: dict[str, Any]) -> None:
        if not self._is_compared:
            self._is_compared = True
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
    """This rank's group of cp consecutive ranks and its place there. A collective call."""
    check_at_least("cp", cp, 1)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks % cp:
        raise UserError(
            f"cp = {cp} does not divide the number of processes, {num_ranks}; start a multiple of "
            f"cp (torchrun --nproc-per-node), or choose another cp"
        )
    if cp == 1:
        return None, 0
    mine, rank = None, dist.get_rank()
    for first in range(0, num_ranks, cp):
        group = dist.new_group(list(range(first, first + cp)))
        if isinstance(group, dist.ProcessGroup) and first <= rank < first + cp:
            mine = group
    return mine, rank % cp


def context_of_trainer(trainer: Any, *, cp: int, **options: Any) -> ContextParallel:
    """Context parallelism of the model of a transformers Trainer, before it trains; UserError for
    settings that do not go with it. options: of `ContextSharder`.
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
        found["a loss that is divided by each rank's own labels"] = (
            "set average_tokens_across_devices=True, with a model that takes num_items_in_batch"
        )
    if args.label_smoothing_factor:
        found[f"label_smoothing_factor = {args.label_smoothing_factor}"] = "set it to 0"
    if trainer.compute_loss_func is not None:
        found["compute_loss_func, which would shift labels after the cut"] = "leave it out"
    for name in ("use_liger_kernel", "torch_compile"):
        if getattr(args, name, False):
            found[f"{name}, which was not tried"] = f"set {name}=False"
    for problem, remedy in found.items():
        raise UserError(f"Balance's cp = {cp} does not go with {problem}; {remedy}")
    return ContextParallel(trainer.model, cp=cp, **options)


def check_model(model: Any) -> None:
    """UserError, with the model's name, for attention that is not what CP ranks compute."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise UserError(f"{type(model).__name__} is no transformers model with a decoder")
    name = f"{type(model).__name__} (model_type {config.model_type!r})"
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{name} is not one of the families whose attention context parallelism covers "
            f"({', '.join(FAMILIES)}); train it with cp = 1"
        )
    for problem, remedy in _problems(config):
        raise UserError(f"{name} has {problem}, which is not computed over CP ranks; {remedy}")


def _problems(config: Any) -> Iterable[tuple[str, str]]:
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
    """Whether backward runs layers again: transformers marks each of them."""
    return any(getattr(module, "gradient_checkpointing", False) for module in decoder.modules())


def _eager_attention(module: nn.Module) -> Callable[..., Any]:
    """The eager attention of the module's own file: sdpa has no soft cap."""
    return sys.modules[type(module).__module__].eager_attention_forward
