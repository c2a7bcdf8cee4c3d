"""Tests context parallelism in transformers: ranks compute what one process does unpacked."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra [hf]")

from tests.adapters.context_models import (
    FAMILY_OPTIONS,
    documents,
    num_labels,
    taken_gradients,
    tiny,
    unpacked,
)
from tests.adapters.context_ranks import (
    DRAWN,
    LENGTHS,
    STEP,
    Case,
    Errors,
    first_checks,
    gradient_error,
    own_loop,
    parity,
)
from tests.sets import nightly
from wlb.adapters import transformers_cp
from wlb.adapters.collate import PaddingFreeCollator
from wlb.adapters.transformers_cp import FAMILIES, NAME, ContextParallel
from wlb.kernels.fused.select import FusedChoice
from wlb.launch.local import run_local
from wlb.parallel.context.attention import ContextAttention
from wlb.sharding import NAMES
from wlb.spec import FusedKernels

PRELOAD = ("tests.adapters.context_ranks",)


def ranks(world: int, body: Any, *args: Any) -> list[Any]:
    return run_local(body, world, *args, start_group=True, timeout_s=600, preload=PRELOAD)


def assert_equal(found: Errors) -> None:
    """Transformers computes losses in float32, also of a model in float64."""
    for case, worst in found:
        allowed = 1e-5 if case.dtype == torch.float32 else 1e-12
        assert worst["loss"] < 1e-6, (case, worst)
        assert max(worst["logits"], worst["gradients"]) < allowed, (case, worst)


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


@pytest.mark.dist
def test_two_ranks_compute_what_one_process_does_unpacked_and_no_document_leaks() -> None:
    for found, changed, other in ranks(2, first_checks):
        assert_equal(found)
        assert changed == [(0, n) for n in (37, 1, 9, 2, 53)]
        assert other is not None
        assert (
            "all ranks must pass the same arguments, but the ranks differ in "
            "documents of the micro-batch: rank 0" in other
        )


@pytest.mark.dist
@pytest.mark.parametrize(
    ("num_ranks", "cases", "batches"),
    [
        pytest.param(2, OTHER_FAMILIES, LENGTHS, id="families", marks=pytest.mark.nightly),
        pytest.param(2, STRATEGIES, DRAWN, id="strategies", marks=pytest.mark.nightly),
        pytest.param(3, STRATEGIES[-2:], DRAWN, id="three ranks", marks=pytest.mark.nightly),
        pytest.param(4, FOUR_RANKS, LENGTHS, id="four ranks", marks=pytest.mark.nightly),
    ],
)
def test_ranks_compute_what_one_process_does_unpacked(
    num_ranks: int, cases: list[Case], batches: tuple[tuple[int, ...], ...]
) -> None:
    for found in ranks(num_ranks, parity, cases, batches):
        assert_equal(found)


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(("dtype", "allowed"), [(None, 1e-5), *nightly((torch.bfloat16, 0.1))])
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


def test_a_layer_that_runs_again_sees_its_own_micro_batch() -> None:
    """Both forward passes come before the backward passes, as in a pipeline."""
    model = tiny("gemma2")
    first, second = documents((23, 4)), documents((5, 9, 30), seed=1)
    expected = unpacked(model, first)[2]
    for name, gradient in unpacked(model, second)[2].items():
        expected[name] += gradient
    context = ContextParallel(model.train(), cp=1)
    model.activation_checkpointing_enable()
    collate = context.collator(PaddingFreeCollator())
    losses = [
        model(**collate(rows), num_items_in_batch=num_labels(rows)).loss for rows in (first, second)
    ]
    for loss in losses:
        loss.backward()
    assert gradient_error(taken_gradients(model), expected) < 1e-5


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


def test_fused_kernels_add_the_gradients_of_keys_where_they_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a run of the trainer: what `kernels.fused = auto` chooses for this device and dtype."""
    asked: list[tuple[Any, ...]] = []
    made: list[ContextAttention] = []

    def choose(requested: FusedKernels, **run: Any) -> FusedChoice:
        asked.append((requested, run["device"].type, run["dtype"]))
        return FusedChoice(fused=True, reason="a test says so")

    class Kept(ContextAttention):
        def __call__(self, *tensors: Any) -> torch.Tensor:
            made.append(self)
            return super().__call__(*tensors)

    monkeypatch.setattr(transformers_cp, "choose_fused", choose)
    monkeypatch.setattr(transformers_cp, "ContextAttention", Kept)
    context = ContextParallel(tiny("llama").train(), cp=1)
    batch = context.collator(PaddingFreeCollator())(documents((9, 4)))
    context.model(**batch)
    assert asked == [(FusedKernels.AUTO, "cpu", torch.float32)]
    assert all(attention.fused for attention in made)
    assert made


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
            r"Phi3ForCausalLM \(model_type 'phi3'\) is not supported .* llama, mistral",
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
    with pytest.raises(ValueError, match="Linear is not a transformers model"):
        ContextParallel(torch.nn.Linear(2, 2), cp=1)
    with pytest.raises(
        ValueError, match="cp = 2 must divide the number of processes, which is 1; start"
    ):
        ContextParallel(tiny("llama"), cp=2)
    with pytest.raises(ValueError, match="cp = 0 must be at least 1"):
        ContextParallel(tiny("llama"), cp=0)


def test_batches_that_are_not_this_rank_s_are_refused() -> None:
    model = tiny("llama").train()
    context = ContextParallel(model, cp=1)
    collate = context.collator(PaddingFreeCollator())
    batch = collate(documents((9, 4)))
    with pytest.raises(ValueError, match="a training batch has no wlb_context"):
        model(**PaddingFreeCollator()(documents((9, 4))), use_cache=False)
    with pytest.raises(
        ValueError, match="the model got an attention_mask together with wlb_context"
    ):
        model(**batch, attention_mask=torch.ones(1, 13))
    with pytest.raises(ValueError, match="wlb_context without position_ids"):
        model(**{name: value for name, value in batch.items() if name != "position_ids"})
    with pytest.raises(
        ValueError, match=r"shape \(1, 12\), but the batch's plan expects \[1, 13\]"
    ):
        model(**batch | {"input_ids": batch["input_ids"][:, 1:]})
    other = dataclasses.replace(context.sharder, cp=2, rank=1)
    with pytest.raises(ValueError, match="made for CP rank 1 of 2, but this is CP rank 0 of 1"):
        model(**other(PaddingFreeCollator()(documents((9, 4)))))
    with pytest.raises(
        ValueError, match="attention with output_attentions = True is not supported"
    ):
        model(**batch, output_attentions=True)


def test_every_family_has_a_tiny_model() -> None:
    assert set(FAMILY_OPTIONS) == set(FAMILIES)
