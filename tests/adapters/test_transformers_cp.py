"""Tests context parallelism in transformers: ranks compute what one process does unpacked."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("trl", reason="needs the extra [hf]")

from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.adapters.context_models import (
    FAMILY_OPTIONS,
    VOCAB,
    documents,
    num_labels,
    taken_gradients,
    tiny,
    unpacked,
)
from tests.adapters.context_trainer import Job, train, trainer_of
from wlb.adapters import transformers_cp
from wlb.adapters.collate import PaddingFreeCollator
from wlb.adapters.collate.sharded import ROWS_KEY
from wlb.adapters.hugging_face import BalancedCollator
from wlb.adapters.transformers_cp import FAMILIES, NAME, ContextParallel
from wlb.launch.local import run_local
from wlb.parallel.world import World
from wlb.plan import IGNORE, UserError
from wlb.sharding import NAMES

PRELOAD = ("trl", "tests.adapters.test_transformers_cp")
LENGTHS = ((37, 1, 9, 2, 53), (2,), (3, 1), (101,), (5, 4, 3, 2, 1, 1, 1, 7, 11, 13, 29, 2, 40))
"""Documents of packed batches: lengths that 2 x cp divides in no case, fewer tokens than ranks."""


def ranks(world: int, body: Any, *args: Any) -> list[Any]:
    return run_local(body, world, *args, start_group=True, timeout_s=600, preload=PRELOAD)


def put_together(local: Tensor, rows: Any, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the packed order of all ranks' rows, [S, ...]."""
    parts = [torch.empty_like(local) for _ in range(rows.plan.cp)]
    dist.all_gather(parts, local.contiguous(), group=group)
    out = local.new_empty((rows.plan.num_tokens, *local.shape[1:]))
    for rank, part in enumerate(parts):
        index = torch.from_numpy(rows.plan.for_rank(rank).token_index)
        out[index] = part[: index.numel()]
    return out


def sharded(model: Any, context: ContextParallel, rows: Any) -> tuple[Tensor, float, Any]:
    """Returns what `unpacked` does, of the group's ranks together."""
    batch = context.collator(PaddingFreeCollator())(rows)
    out = model(**batch, num_items_in_batch=num_labels(rows))
    out.loss.backward()
    loss = out.loss.detach().clone()
    dist.all_reduce(loss, group=context.group)
    gradients = taken_gradients(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=context.group)
    logits = put_together(out.logits[0].detach(), batch[ROWS_KEY], context.group)
    return logits, float(loss), gradients


def errors(found: Any, expected: Any) -> dict[str, float]:
    """Returns the largest error of logits and loss over their largest value, and of each gradient
    over its own, or over a hundredth of the model's largest where it nearly vanishes."""
    (logits, loss, gradients), (logits0, loss0, gradients0) = found, expected
    return {
        "logits": float((logits - logits0).abs().max()) / float(logits0.abs().max()),
        "loss": abs(loss - loss0) / max(1.0, abs(loss0)),
        "gradients": gradient_error(gradients, gradients0),
    }


def gradient_error(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    least = max(float(truth.abs().max()) for truth in expected.values()) / 100
    return max(
        float((gradients[name] - truth).abs().max()) / max(least, float(truth.abs().max()))
        for name, truth in expected.items()
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """How a model is trained. options: of ContextParallel. recompute: gradient checkpointing."""

    family: str = "llama"
    options: tuple[tuple[str, Any], ...] = ()
    recompute: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def allowed(self) -> float:
        return 1e-5 if self.dtype == torch.float32 else 1e-12


def assert_equal(case: Case, worst: dict[str, float]) -> None:
    """transformers computes losses in float32, also of a model in float64."""
    assert worst["loss"] < 1e-6, (case, worst)
    assert max(worst["logits"], worst["gradients"]) < case.allowed, (case, worst)


def parity(world: World, cases: list[Case]) -> list[tuple[Case, dict[str, float]]]:
    """Returns the worst errors of each case over all packed batches."""
    out = []
    for case in cases:
        model, worst = tiny(case.family).to(case.dtype), dict[str, float]()
        expected = [unpacked(model, documents(lengths)) for lengths in LENGTHS]
        context = ContextParallel(model, cp=world.world_size, **dict(case.options))
        if case.recompute:
            model.activation_checkpointing_enable()
        model.train()
        for lengths, truth in zip(LENGTHS, expected, strict=True):
            found = errors(sharded(model, context, documents(lengths)), truth)
            worst = {name: max(value, worst.get(name, 0.0)) for name, value in found.items()}
        out.append((case, worst))
    return out


OTHER_FAMILIES = [Case(family) for family in FAMILIES if family != "llama"]
STRATEGIES = [
    Case(options=(("strategy", name), ("exchange", exchange), ("row_multiple", 3)))
    for name, exchange in zip(NAMES, ["needed", "auto", "gather", "needed", "auto"], strict=True)
]
FOUR_RANKS = [
    Case(),
    Case("qwen3", (("strategy", "balanced"), ("exchange", "needed")), recompute=True),
    Case("gemma2", recompute=True),
]


def leaks(model: Any, context: ContextParallel, lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns, for every document of a packed batch, how many positions of others change when all
    its tokens do, in any bit of their logits, and how many of its own."""
    rows, out = documents(lengths), []
    document = torch.repeat_interleave(torch.tensor(lengths))
    before, *_ = sharded(model, context, rows)
    for i, row in enumerate(rows):
        changed = [*rows]
        changed[i] = row | {"input_ids": [(token + 1) % VOCAB for token in row["input_ids"]]}
        after, *_ = sharded(model, context, changed)
        differs = (after != before).any(-1)
        own = differs[document == i]
        out.append((int(differs.sum() - own.sum()), int(own.sum())))
    return out


def llama(world: World) -> Any:
    """The two checks of a quick run, in one launch."""
    errors = parity(world, [Case(), Case(recompute=True), Case(dtype=torch.float64)])
    model = tiny("llama").train()
    context = ContextParallel(model, cp=world.world_size, exchange="needed")
    other = None
    strangers = documents((5, 4), seed=world.rank)
    try:
        mine = ContextParallel(tiny("llama").train(), cp=2)
        mine.model(**mine.collator(PaddingFreeCollator())(strangers))
    except UserError as error:
        other = str(error)
    return errors, leaks(model, context, (37, 1, 9, 2, 53)), other


@pytest.mark.dist
def test_two_ranks_compute_what_one_process_does_unpacked_and_no_document_leaks() -> None:
    for found, changed, other in ranks(2, llama):
        for case, worst in found:
            assert_equal(case, worst)
        assert changed == [(0, n) for n in (37, 1, 9, 2, 53)]
        assert other is not None
        assert "ranks have different arguments. documents of the micro-batch: rank 0" in other


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [(2, OTHER_FAMILIES), (2, STRATEGIES), (4, FOUR_RANKS)],
    ids=["families", "strategies", "four ranks"],
)
def test_ranks_compute_what_one_process_does_unpacked(num_ranks: int, cases: list[Case]) -> None:
    for found in ranks(num_ranks, parity, cases):
        for case, worst in found:
            assert_equal(case, worst)


STEP = [[(37, 1, 9), (2, 53)], [(5, 4, 3, 40), ()]]
"""Documents of a step, by micro-batch and data-parallel rank; the last has none left."""


def own_loop(world: World, dtype: torch.dtype | None) -> tuple[int, float]:
    """Returns the labels that all ranks count, and the worst error of the gradients of FSDP2 over
    dp 2 x cp 2, with accumulation and recomputed layers, over their largest value. dtype: in which
    layers compute."""
    model = tiny("llama").train()
    rows = [[documents(n, seed=i) for i, n in enumerate(ranks)] for ranks in STEP]
    _, _, expected = unpacked(model, [row for of in rows for micro in of for row in micro])
    context = ContextParallel(model, cp=2)
    model.activation_checkpointing_enable()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    collate = context.collator(BalancedCollator())
    batches = [collate(of[world.rank // 2]) for of in rows]
    # As transformers' Trainer counts and scales.
    labels = torch.tensor(sum(int((b["shift_labels"] != IGNORE).sum()) for b in batches))
    dist.all_reduce(labels)
    for i, batch in enumerate(batches):
        model.set_requires_gradient_sync(i == len(batches) - 1)
        loss = model(**batch, num_items_in_batch=labels).loss * world.world_size
        loss.backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return int(labels), gradient_error(found, expected)


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(("dtype", "allowed"), [(None, 1e-5), (torch.bfloat16, 0.1)])
def test_fsdp2_over_dp_and_cp_sums_gradients_as_one_process(
    dtype: torch.dtype | None, allowed: float
) -> None:
    expected = num_labels([row for of in STEP for n in of for row in documents(n)])
    for labels, worst in ranks(4, own_loop, dtype):
        assert labels == expected
        assert worst < allowed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_process_alone_computes_the_same(family: str) -> None:
    """CP 1 has the whole path but the exchange; generation and evaluation do not take it."""
    model = tiny(family)
    rows = documents((23, 1, 12, 9))
    logits, _, gradients = unpacked(model, rows)
    prompt = torch.tensor([rows[0]["input_ids"][:12]])
    said = model.generate(prompt, max_new_tokens=5, do_sample=False)
    context = ContextParallel(model.train(), cp=1)
    batch = context.collator(PaddingFreeCollator())(rows)
    out = model(**batch, num_items_in_batch=num_labels(rows))
    out.loss.backward()
    difference = (out.logits[0].detach() - logits).abs().max()
    assert float(difference) < 1e-5 * float(logits.abs().max())
    assert gradient_error(taken_gradients(model), gradients) < 1e-5
    model.eval()
    assert model.generate(prompt, max_new_tokens=5, do_sample=False).tolist() == said.tolist()
    padded = torch.tensor([rows[2]["input_ids"], [0] * 3 + rows[3]["input_ids"]])
    mask = torch.tensor([[1] * 12, [0] * 3 + [1] * 9])
    ours = model(input_ids=padded, attention_mask=mask).logits[1, 3:]
    context.close()
    theirs = model(input_ids=padded, attention_mask=mask).logits[1, 3:]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert model.config._attn_implementation != NAME


def test_a_saved_model_does_not_ask_for_us(tmp_path: Path) -> None:
    model = tiny("llama")
    ContextParallel(model, cp=1)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text("utf-8")


def test_no_mask_of_tokens_squared_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a mask was made")

    model = tiny("gemma3_text").train()
    context = ContextParallel(model, cp=1)
    monkeypatch.setattr(transformers_cp, "sdpa_mask", refused)
    model(**context.collator(PaddingFreeCollator())(documents((9, 4))))
    model.eval()
    with pytest.raises(AssertionError, match="a mask was made"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


def test_autocast_computes_attention_in_its_dtype() -> None:
    """Qwen3 norms queries and keys in float32, so that they differ from values in dtype."""
    model = tiny("qwen3").train()
    rows = documents((23, 9))
    logits, *_ = unpacked(model, rows)
    context = ContextParallel(model, cp=1)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**context.collator(PaddingFreeCollator())(rows))
    difference = float((out.logits[0].detach() - logits).abs().max())
    assert 0 < difference < 0.1 * float(logits.abs().max())


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "phi3",
            {"pad_token_id": 0},
            r"Phi3ForCausalLM \(model_type 'phi3'\) is not one of the fa",
        ),
        (
            "llama",
            {"attention_dropout": 0.1},
            r"LlamaForCausalLM .* attention_dropout = 0\.1, whic",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention that is not causal"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "RoPE of type dynamic.*choose another rope_type",
        ),
    ],
)
def test_models_that_are_not_covered_are_refused_by_name(
    family: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ContextParallel(tiny(family, **options), cp=1)


def test_a_model_without_decoder_and_too_few_processes_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear is no transformers model with a decoder"):
        ContextParallel(torch.nn.Linear(2, 2), cp=1)
    with pytest.raises(
        ValueError, match="cp = 2 does not divide the number of processes, 1; start"
    ):
        ContextParallel(tiny("llama"), cp=2)
    with pytest.raises(ValueError, match="cp = 0 must be at least 1"):
        ContextParallel(tiny("llama"), cp=0)


def test_batches_that_are_not_this_rank_s_are_refused() -> None:
    model = tiny("llama").train()
    context = ContextParallel(model, cp=1)
    collate = context.collator(PaddingFreeCollator())
    batch = collate(documents((9, 4)))
    with pytest.raises(ValueError, match="a training batch came without wlb_context"):
        model(**PaddingFreeCollator()(documents((9, 4))), use_cache=False)
    with pytest.raises(ValueError, match="the model got an attention_mask and a plan"):
        model(**batch, attention_mask=torch.ones(1, 13))
    with pytest.raises(ValueError, match="a plan without position_ids"):
        model(**{name: value for name, value in batch.items() if name != "position_ids"})
    with pytest.raises(ValueError, match=r"shape \(1, 12\), the plan has \[1, 13\]"):
        model(**batch | {"input_ids": batch["input_ids"][:, 1:]})
    other = dataclasses.replace(context.sharder, cp=2, rank=1)
    with pytest.raises(ValueError, match="cut for rank 1 of 2, this is rank 0 of 1"):
        model(**other(PaddingFreeCollator()(documents((9, 4)))))
    with pytest.raises(ValueError, match="attention with output_attentions is not computed"):
        model(**batch, output_attentions=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_tokens_across_devices": False}, "set average_tokens_across_devices=True"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor = 0\.1; set it to 0"),
        ({"torch_compile": True}, "torch_compile, which was not tried; set torch_compile=False"),
        ({}, "cp = 2 does not divide the number of processes, 1"),
    ],
)
def test_options_of_a_trainer_that_do_not_go_with_cp(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    job = Job(cp=2, sft=False, options=tuple(options.items()))
    with pytest.raises(ValueError, match=message):
        trainer_of(job, str(tmp_path))


JOBS = [
    # Two ranks that share each micro-batch, beside one process.
    (Job(cp=2, sft=False), 2, Job(cp=1, sft=False), 1),
    # dp 2 x cp 2 with recomputed layers, beside two data-parallel processes.
    (Job(cp=2, options=(("activation_checkpointing", True),)), 4, Job(cp=1), 2),
    # The same with FSDP2, by accelerate.
    (Job(cp=2, options=(("activation_checkpointing", True),), fsdp=True), 4, Job(cp=1), 2),
]


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(
    ("job", "num_ranks", "other", "num_others"), JOBS, ids=["Trainer", "SFTTrainer", "FSDP2"]
)
def test_trainers_train_what_processes_without_cp_do(
    job: Job, num_ranks: int, other: Job, num_others: int, tmp_path: Path
) -> None:
    """The other run has transformers' own attention, a whole micro-batch a process, and the same
    plan; it must give the same losses, norms and weights over steps of two micro-batches."""
    found = ranks(num_ranks, train, job, str(tmp_path))
    expected = ranks(num_others, train, other, str(tmp_path))[0]
    assert len(expected.losses) == 3
    for each in found:
        assert each.losses == pytest.approx(expected.losses, rel=1e-5)
        assert each.norms == pytest.approx(expected.norms, rel=1e-4)
        assert each.evaluated == pytest.approx(expected.evaluated, rel=1e-4)
        assert each.said == expected.said
        assert each.is_fsdp == job.fsdp
        for name, truth in expected.weights.items():
            scale = float(truth.abs().max())
            assert float((each.weights[name] - truth).abs().max()) <= 1e-4 * scale + 1e-7, name
            assert scale > 0, name


def test_every_family_has_a_tiny_model() -> None:
    assert set(FAMILY_OPTIONS) == set(FAMILIES)
