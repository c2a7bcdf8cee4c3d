"""Tests what balanced trainers of transformers and TRL share, beside a trainer's own settings."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs the extra [hf]")
pytest.importorskip("trl", reason="needs the extra [hf]")

from datasets import Dataset
from transformers import (
    CONFIG_MAPPING,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests.adapters.context_models import SMALL
from tests.adapters.trainer_stand_in import ROWS, StandIn
from wlb.adapters.collate import PaddingFreeCollator
from wlb.adapters.hugging_face import Balance, BalancedBatchSampler, balanced
from wlb.adapters.trl import BalancedStep, balanced_steps
from wlb.plan import UserError


def with_delay(cls: type = StandIn, **options: Any) -> Any:
    return balanced(cls)(balance=Balance(context_window=64), **options)


def by_steps(cls: type = StandIn, **options: Any) -> Any:
    return balanced_steps(cls)(max_tokens=100, **options)


@pytest.fixture(params=[with_delay, by_steps])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes either trainer."""
    return request.param


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loader_trains_on_any_number_of_processes(
    make: Callable[..., Any], world_size: int
) -> None:
    loader = make(world_size=world_size).get_train_dataloader()
    batches = list(loader)
    assert len(batches) == len(loader)
    assert all(batch["input_ids"].shape[0] == 1 for batch in batches)
    # A run that resumes sets the epoch there.
    assert isinstance(loader.batch_sampler.sampler, BalancedBatchSampler | BalancedStep)


def test_a_collator_that_was_given_collates(make: Callable[..., Any]) -> None:
    def mine(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"mine": len(rows)}

    assert "mine" in next(iter(make(data_collator=mine).get_train_dataloader()))
    aligned = make(data_collator=PaddingFreeCollator(pad_to_multiple_of=64))
    assert next(iter(aligned.get_train_dataloader()))["input_ids"].shape[1] % 64 == 0
    later = make()
    later.data_collator = mine
    assert "mine" in next(iter(later.get_train_dataloader()))


def test_a_collator_is_known_behind_a_subclass_of_any_arguments() -> None:
    class Wrapped(StandIn):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    def mine(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"mine": len(rows)}

    by_place = balanced_steps(Wrapped)(mine, max_tokens=100)
    by_name = balanced_steps(Wrapped)(data_collator=mine, max_tokens=100)
    for trainer in (by_place, by_name):
        assert "mine" in next(iter(trainer.get_train_dataloader()))


def test_a_loader_has_the_trainers_own_options(make: Callable[..., Any]) -> None:
    options = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3}
    given: dict[str, Any] = {f"dataloader_{name}": value for name, value in options.items()}
    loader = make(
        **given, dataloader_pin_memory=True, dataloader_multiprocessing_context="spawn"
    ).get_train_dataloader()
    assert {name: getattr(loader, name) for name in options} == options
    assert loader.pin_memory
    assert loader.multiprocessing_context.get_start_method() == "spawn"


def test_workers_that_lose_the_order_are_refused(make: Callable[..., Any]) -> None:
    trainer = make(dataloader_in_order=False)
    with pytest.raises(UserError, match=r"dataloader_in_order = False .* = True"):
        trainer.get_train_dataloader()


def test_context_parallelism_that_mixes_documents_is_refused(make: Callable[..., Any]) -> None:
    trainer = make(world_size=4, cp=2)
    says = r"cp_size = 2 .* documents .* see each other; set cp_size = 1 and use Balance\(cp=2\)"
    with pytest.raises(UserError, match=says):
        trainer.get_train_dataloader()
    with pytest.raises(UserError, match=r"sp_size = 2.* distributes"):
        make(world_size=4, sp=2).get_train_dataloader()


def test_ranks_of_tensor_parallelism_train_whole_steps(make: Callable[..., Any]) -> None:
    """Accelerate deals to processes / tp, and each takes accumulation steps of every step."""
    loader = make(world_size=4, tp=2).get_train_dataloader()
    alone = make(world_size=2).get_train_dataloader()
    assert list(loader.batch_sampler) == list(alone.batch_sampler)
    assert len(loader) % 2 == 0


def test_a_step_under_tensor_parallelism_takes_the_rows_of_its_ranks() -> None:
    sampler = by_steps(world_size=4, tp=2).get_train_dataloader().batch_sampler.sampler
    assert sampler.samples_per_step == 4 * 2 * 2
    assert len(list(sampler)) == len(ROWS) // 16 * 2 * 2


def test_a_search_of_a_batch_size_that_does_not_count_is_refused() -> None:
    trainer = with_delay(auto_find_batch_size=True)
    with pytest.raises(UserError, match=r"auto_find_batch_size = True .* lower context"):
        trainer.get_train_dataloader()


def test_losses_over_a_ranks_own_tokens_are_refused(make: Callable[..., Any]) -> None:
    trainer = make(world_size=2, average_tokens_across_devices=False)
    with pytest.raises(UserError, match=r"average_tokens_across_devices = False .* = True"):
        trainer.get_train_dataloader()
    alone = make(world_size=1, average_tokens_across_devices=False)
    assert len(alone.get_train_dataloader()) > 0


class OwnMean(StandIn):
    """Its model divides by the labels that it sees."""

    model_accepts_loss_kwargs = False


@pytest.mark.parametrize(("world_size", "accumulated"), [(2, 1), (1, 2)])
def test_losses_over_a_micro_batches_own_tokens_are_refused(
    make: Callable[..., Any], world_size: int, accumulated: int
) -> None:
    sizes = {"world_size": world_size, "gradient_accumulation_steps": accumulated}
    found = rf"\({world_size} ranks with gradient_accumulation_steps = {accumulated}\)"
    says = f"does not accept num_items_in_batch, .* {found}; give a compute_loss_func"
    with pytest.raises(UserError, match=says):
        make(OwnMean, **sizes).get_train_dataloader()
    assert len(make(OwnMean, gradient_accumulation_steps=1).get_train_dataloader()) > 0

    class OwnLoss(OwnMean):
        compute_loss_func = print

    class Scaled(OwnMean):
        loss_is_scaled_for_ga = True

    class Mean(StandIn):
        loss_is_scaled_for_ga = False

    for scaled in (OwnLoss, Scaled):
        assert len(make(scaled, **sizes).get_train_dataloader()) > 0
    with pytest.raises(UserError, match=r"loss_is_scaled_for_ga = False .* = True"):
        make(Mean, **sizes).get_train_dataloader()


def test_rows_of_other_trainers_are_refused_by_their_columns(make: Callable[..., Any]) -> None:
    trainer = make()
    trainer.train_dataset = Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]})
    says = r"columns prompt, chosen, rejected, but no input_ids, .* use `balanced_grpo` of wlb"
    with pytest.raises(UserError, match=says):
        trainer.get_train_dataloader()


@pytest.mark.parametrize(
    ("auto", "family", "why"),
    [
        (AutoModelForSequenceClassification, "llama", "made for SequenceClassification"),
        (AutoModelForTokenClassification, "llama", "made for TokenClassification"),
        (AutoModelForMaskedLM, "bert", "made for MaskedLM"),
    ],
)
def test_models_of_other_tasks_are_refused(
    make: Callable[..., Any], auto: Any, family: str, why: str
) -> None:
    trainer = make()
    trainer.model = auto.from_config(CONFIG_MAPPING[family](**SMALL))
    name = type(trainer.model).__name__
    with pytest.raises(UserError, match=rf"^{name} is not a causal language model \(.*{why}"):
        trainer.get_train_dataloader()
    config = SimpleNamespace(is_encoder_decoder=True)
    trainer.model = SimpleNamespace(config=config)
    with pytest.raises(UserError, match=r"not a causal language model \(it has an encoder\)"):
        trainer.get_train_dataloader()
