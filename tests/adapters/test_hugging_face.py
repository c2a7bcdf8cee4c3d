"""Tests transformers' and TRL's trainers on balanced batches: training, resuming, refusals."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate", reason="needs the extra [hf]")
pytest.importorskip("trl", reason="needs the extra [hf]")

from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import Trainer

from tests.adapters.trainer_worker import WINDOW, Recorder, Rows, arguments, lengths, tiny_model
from wlb.adapters import trainers
from wlb.adapters.collate import PaddingFreeCollator
from wlb.adapters.dealt import DealtRows, RankBalance, work_of
from wlb.adapters.hugging_face import Balance, BalancedBatchSampler, BalancedCollator, balanced
from wlb.plan import IGNORE

# TRL's own use of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")

BALANCE = Balance(context_window=WINDOW)


@pytest.mark.filterwarnings("ignore:.*planned steps fill only:UserWarning")
@given(
    rows=st.lists(st.integers(1, WINDOW), min_size=1, max_size=60),
    num_ranks=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 5),
)
def test_every_row_is_trained_once_an_epoch_and_epochs_have_equal_steps(
    rows: list[int], num_ranks: int, accumulation: int, epochs: int, seed: int
) -> None:
    batches = BalancedBatchSampler(
        rows,
        Balance(context_window=WINDOW, seed=seed),
        num_ranks=num_ranks,
        accumulation_steps=accumulation,
        epochs=epochs,
    )
    seen, sizes = Counter[int](), []
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        made = list(batches)
        assert len(made) == len(batches)
        assert len(made) % (num_ranks * accumulation) == 0
        sizes.append(len(made) // (num_ranks * accumulation))
        for batch in made:
            seen.update(batch)
            assert sum(rows[i] for i in batch) <= WINDOW * 3 // 2
        # As accelerate deals them, and as of_rank does.
        for rank in range(num_ranks):
            theirs = list(BatchSamplerShard(batches, num_ranks, rank))
            assert theirs == list(batches.of_rank(rank)) == made[rank::num_ranks]
            assert len(batches.of_rank(rank)) == len(theirs)
    assert seen == dict.fromkeys(range(len(rows)), epochs)
    assert sum(sizes) == batches.num_steps
    full = [batches.steps_per_epoch] * (batches.num_steps // batches.steps_per_epoch)
    assert sizes[: len(full)] == full
    assert sum(size not in (0, batches.steps_per_epoch) for size in sizes) <= 1
    assert epochs * batches.steps_per_epoch - batches.num_steps < epochs


@pytest.mark.parametrize("max_steps", [1, 7, 40])
def test_max_steps_are_the_first_of_many_epochs_and_planned_when_asked_for(max_steps: int) -> None:
    sizes: dict[str, Any] = {"num_ranks": 2, "accumulation_steps": 2}
    batches = BalancedBatchSampler(lengths(), BALANCE, max_steps=max_steps, **sizes)
    whole = BalancedBatchSampler(lengths(), BALANCE, epochs=20, **sizes)
    assert whole.num_steps > 40
    expected = [row.tolist() for step in range(max_steps) for row in whole.dealt.step(step)]
    dealt = batches._dealt_steps
    assert dealt.num_planned == 0
    assert batches.num_steps == max_steps
    got: list[list[int]] = []
    for epoch in range(batches.epochs):
        batches.set_epoch(epoch)
        made = list(batches)
        assert len(made) == len(batches)
        got += made
        assert dealt.num_planned == len(got) // 4, "and none besides"
    assert got == expected
    # Resumed in a later epoch, as accelerate does: skipped batches are planned again.
    again = BalancedBatchSampler(lengths(), BALANCE, max_steps=max_steps, **sizes)
    again.set_epoch(batches.epochs - 1)
    assert list(again) == made
    assert batches.rank_balance().num_steps == max_steps
    # The Trainer counts epochs by their length.
    assert batches.epochs == -(-max_steps // batches.steps_per_epoch)


def test_max_steps_within_an_epoch_end_in_it() -> None:
    batches = BalancedBatchSampler([100] * 600, BALANCE, num_ranks=1, max_steps=3)
    assert (batches.epochs, batches.steps_per_epoch, len(list(batches))) == (1, 3, 3)
    with pytest.raises(ValueError, match="max_steps = 0 must be at least 1"):
        BalancedBatchSampler([100], BALANCE, num_ranks=1, max_steps=0)


def test_processes_of_a_cp_group_get_the_same_micro_batches() -> None:
    """Accelerate deals by the number of the process, and each loop of one's own by `of_rank`."""
    sizes: dict[str, Any] = {"num_ranks": 2, "accumulation_steps": 2, "epochs": 2}
    alone = BalancedBatchSampler(lengths(), BALANCE, **sizes)
    shared = BalancedBatchSampler(lengths(), dataclasses.replace(BALANCE, cp=3), **sizes)
    assert shared.num_processes == 6
    for epoch in range(2):
        alone.set_epoch(epoch)
        shared.set_epoch(epoch)
        assert len(list(shared)) == len(shared) == 3 * len(alone)
        for process in range(6):
            theirs = list(BatchSamplerShard(shared, 6, process))
            assert theirs == list(shared.of_rank(process)) == list(alone.of_rank(process // 3))
            assert len(shared.of_rank(process)) == len(theirs)
    with pytest.raises(ValueError, match="rank = 6 must be between 0 and 5"):
        shared.of_rank(6)


def test_epochs_without_a_step_are_told() -> None:
    """A step's two micro-batches hold nearly all rows of an epoch."""
    batches = BalancedBatchSampler([100] * 6, BALANCE, num_ranks=2, epochs=10)
    assert (batches.num_steps, batches.steps_per_epoch) == (12, 2)
    for epoch in range(6):
        batches.set_epoch(epoch)
        assert list(batches)
    batches.set_epoch(6)
    with pytest.warns(UserWarning, match=r"12 planned steps fill only 6 of "):
        assert list(batches) == []


def test_ranks_get_more_equal_work_than_by_chance() -> None:
    rows = np.array(lengths())
    batches = BalancedBatchSampler(rows, BALANCE, num_ranks=4, accumulation_steps=2, epochs=3)
    ours = batches.rank_balance()
    dealt = np.random.default_rng(0).permutation(rows)[: 120 // 24 * 24].reshape(-1, 4, 2, 3)
    chance = RankBalance.of(work_of(list(dealt), BALANCE.cost))
    assert 1 <= ours.imbalance < 1.1 < chance.imbalance
    assert chance.utilisation < 0.9 < ours.utilisation <= 1


def test_work_is_the_sum_of_what_a_rank_trains() -> None:
    rows = np.array([5, 9, 2, 7, 1, 3])
    batches = BalancedBatchSampler(rows, BALANCE, num_ranks=2, accumulation_steps=2)
    steps = []
    order = list(batches)
    for at in range(0, len(order), 4):
        step = order[at : at + 4]
        steps.append([[rows[step[0]], rows[step[2]]], [rows[step[1]], rows[step[3]]]])
    expected = work_of(steps, BALANCE.cost)
    np.testing.assert_array_equal(batches.dealt.work_ns(rows, BALANCE.cost), expected)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="257"):
        BalancedBatchSampler([3, 257], BALANCE, num_ranks=1)
    batches = BalancedBatchSampler([3, 25], BALANCE, num_ranks=1)
    batches.set_epoch(1)
    with pytest.raises(IndexError, match="epoch 1 was not planned"):
        next(iter(batches))
    with pytest.raises(ValueError, match="rank = 1 must be between 0 and 0"):
        batches.of_rank(1)
    with pytest.raises(ValueError, match="epochs = 0 must be at least 1"):
        BalancedBatchSampler([3, 25], BALANCE, num_ranks=1, epochs=0)
    endless = BALANCE.planner([3, 25], num_ranks=1, accumulation_steps=1, epochs=0)
    with pytest.raises(ValueError, match="epochs = 0"):
        DealtRows.of(endless, 2)


def test_a_micro_batch_without_rows_is_a_token_that_trains_nothing() -> None:
    made = BalancedCollator(collator=PaddingFreeCollator(pad_token_id=7))([])
    assert made["input_ids"].tolist() == [[7]]
    assert made["labels"].tolist() == [[IGNORE]]
    assert set(made) == set(BalancedCollator()([{"input_ids": [1, 2]}]))


def test_a_micro_batch_without_rows_is_made_as_the_others_are() -> None:
    collator = PaddingFreeCollator(
        return_shift_labels=True, pad_to_multiple_of=4, position_ids_start=2
    )
    made = BalancedCollator(collator=collator)([])
    assert made["input_ids"].shape == made["shift_labels"].shape == (1, 4)
    assert set(made["labels"][0].tolist() + made["shift_labels"][0].tolist()) == {IGNORE}
    assert made["position_ids"][0, 0] == 2


def trainer_of(tmp_path: Path, dataset: Any, cls: Any = Trainer, **options: Any) -> Any:
    return balanced(cls)(
        model=tiny_model(),
        args=arguments(str(tmp_path), **options),
        train_dataset=dataset,
        data_collator=Recorder() if isinstance(dataset, Rows) else None,
        balance=BALANCE,
    )


@pytest.mark.full
def test_the_loss_of_a_step_is_the_mean_of_its_labels(tmp_path: Path) -> None:
    """The reference is a model that sees one document at a time."""
    dataset = Rows()
    trainer = trainer_of(tmp_path, dataset, learning_rate=0.0, num_train_epochs=1)
    trainer.train()
    model, batches = tiny_model(), trainer.balanced_batches
    batches.set_epoch(0)
    order, expected = list(batches), []
    for at in range(0, len(order), 2):
        total, num = 0.0, 0
        for row in order[at] + order[at + 1]:
            tokens = torch.tensor([dataset.rows[row]])
            with torch.no_grad():
                mean = model(input_ids=tokens, labels=tokens).loss
            total, num = total + float(mean) * (tokens.shape[1] - 1), num + tokens.shape[1] - 1
        expected.append(total / num)
    found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert found == pytest.approx(expected, abs=2e-4)  # the Trainer rounds what it logs


def test_lengths_of_datasets_are_those_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds for a dataset that was shuffled and cut, whose rows are not in table
    order.
    """
    monkeypatch.setattr(trainers, "BLOCK", 7)
    rows = [{"input_ids": [1] * n} for n in lengths()]
    whole = Dataset.from_list(rows)
    for dataset in (whole, whole.shuffle(seed=1).select(range(40)), rows, whole.select([])):
        expected = [len(row["input_ids"]) for row in dataset]
        assert trainers.lengths_of(dataset).tolist() == expected


def test_lengths_of_rows_made_as_they_are_read() -> None:
    dataset = Dataset.from_list([{"text": "a" * n} for n in lengths()])

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] * min(8, len(text)) for text in rows["text"]]}

    found = trainers.lengths_of(dataset.with_transform(tokenize))
    assert found.tolist() == [min(8, n) for n in lengths()]
    with pytest.raises(ValueError, match=r"row 0 .* has the keys \['texts'\], but no input_ids"):
        trainers.lengths_of(dataset.with_transform(lambda rows: {"texts": rows["text"]}))


def test_a_row_of_null_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "BLOCK", 2)
    dataset = Dataset.from_dict({"input_ids": [[1], [2, 3], [4], None]})
    with pytest.raises(ValueError, match="row 3 of train_dataset has input_ids = null"):
        trainers.lengths_of(dataset)


def first_batch(tmp_path: Path, rows: Dataset, **options: Any) -> dict[str, Any]:
    """Returns the first batch, with columns of the Trainer's own choice."""
    ours = {"remove_unused_columns": True, "gradient_accumulation_steps": 1, "num_train_epochs": 1}
    trainer = trainer_of(tmp_path, rows, **(ours | options))
    return next(iter(trainer.get_train_dataloader()))


def test_columns_that_no_model_takes_do_not_hide_what_masks_the_loss(tmp_path: Path) -> None:
    rows = {"input_ids": [[1, 2, 3], [5, 6]], "text": ["a", "b"]}
    labels = {"labels": [[IGNORE, 2, 3], [IGNORE, 6]], "completion_mask": [[0, 1, 1], [0, 1]]}
    got = first_batch(tmp_path, Dataset.from_dict(rows | labels))
    assert sorted(got["labels"][0].tolist()) == [IGNORE, IGNORE, 2, 3, 6]
    for mask in ("completion_mask", "assistant_masks", "loss_mask"):
        for remove in (True, False):
            masked = Dataset.from_dict({**rows, mask: [[0, 1, 1], [0, 1]]})
            with pytest.raises(
                ValueError, match=f"train_dataset has the column {mask} but no labels"
            ):
                first_batch(tmp_path, masked, remove_unused_columns=remove)
    padded = Dataset.from_dict(rows | {"attention_mask": [[1, 1, 0], [1, 1]]})
    with pytest.raises(ValueError, match="tokenize without padding"):
        first_batch(tmp_path, padded)


def test_a_transform_keeps_the_columns_it_reads(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": ["ab", "c"]}).with_transform(
        lambda rows: {"input_ids": [[len(text)] * 3 for text in rows["text"]]}
    )
    assert sorted(first_batch(tmp_path, rows)["input_ids"][0].tolist()) == [1, 1, 1, 2, 2, 2]


def test_a_collator_that_was_given_is_kept(tmp_path: Path) -> None:
    """This also holds for one that trainers would choose by themselves."""
    from transformers import default_data_collator

    def trainer(given: Any) -> Any:
        return balanced(Trainer)(
            model=tiny_model(),
            args=arguments(str(tmp_path), gradient_accumulation_steps=1, num_train_epochs=1),
            train_dataset=Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]}),
            data_collator=given,
            balance=BALANCE,
        )

    rows = next(iter(trainer(default_data_collator).get_train_dataloader()))
    assert rows["input_ids"].shape == (2, 2)
    ours = PaddingFreeCollator(pad_to_multiple_of=8)
    rows = next(iter(trainer(ours).get_train_dataloader()))
    assert rows["input_ids"].shape == (1, 8)
    later = trainer(None)
    assert next(iter(later.get_train_dataloader()))["input_ids"].shape == (1, 4)
    later.data_collator = ours
    assert next(iter(later.get_train_dataloader()))["input_ids"].shape == (1, 8)


@pytest.mark.full
def test_steps_in_the_place_of_epochs(tmp_path: Path) -> None:
    """The dataset has no columns to remove, which is what the Trainer's default asks for."""
    trainer = trainer_of(tmp_path, Rows(), max_steps=40, remove_unused_columns=True)
    trainer.train()
    assert trainer.state.global_step == 40
    assert trainer.balanced_batches.num_steps == 40


@pytest.mark.full
def test_the_schedule_is_as_long_as_the_steps_there_are(tmp_path: Path) -> None:
    """Linear decay to 0 ends with the last step, not with those of epochs that have none."""
    rows = [{"input_ids": [1] * 100} for _ in range(6)]
    trainer = trainer_of(
        tmp_path, Dataset.from_list(rows), num_train_epochs=10, gradient_accumulation_steps=2
    )
    with pytest.warns(UserWarning, match="planned steps fill only"):
        trainer.train()
    num_steps = trainer.balanced_batches.num_steps
    assert trainer.state.global_step == trainer.state.max_steps == num_steps < 20
    assert set(trainer.lr_scheduler.get_last_lr()) == {0.0}


@pytest.mark.full
def test_trl_trains_completions_alone(tmp_path: Path) -> None:
    """Rows are prompts and completions, tokenized already; labels are the completions'."""
    from trl import SFTConfig, SFTTrainer

    rng = np.random.default_rng(2)
    rows: list[dict[str, Any]] = []
    for n in lengths()[:40]:
        ids = rng.integers(0, 64, n).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORE] * (n // 2) + ids[n // 2 :]})
    config = SFTConfig(
        str(tmp_path),
        max_length=WINDOW,
        num_train_epochs=1,
        gradient_accumulation_steps=2,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        learning_rate=0.0,
    )
    collator = BalancedCollator()
    trainer = balanced(SFTTrainer)(
        model=tiny_model(),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        data_collator=collator,
        balance=BALANCE,
    )
    trainer.train()
    assert trainer.state.global_step == trainer.balanced_batches.num_steps
    model, (first, second, *_) = tiny_model(), list(trainer.balanced_batches)
    total, num = 0.0, 0
    for row in first + second:
        ids, labels = (torch.tensor([rows[row][key]]) for key in ("input_ids", "labels"))
        count = int((labels[:, 1:] != IGNORE).sum())
        if count:
            with torch.no_grad():
                total += float(model(input_ids=ids, labels=labels).loss) * count
            num += count
    found = next(line["loss"] for line in trainer.state.log_history if "loss" in line)
    assert found == pytest.approx(total / num, abs=2e-4)


def tokenizer() -> Any:
    """Returns a tokenizer of 64 words, because SFTTrainer wants one; rows are tokens already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Dataset.from_list([{"input_ids": [1], "seq_lengths": [1]}]), {}, "already packed"),
        (
            Dataset.from_list([{"input_ids": [1], "seq_lengths": [1]}]).with_format("torch"),
            {"remove_unused_columns": True},
            "already packed",
        ),
        (
            IterableDataset.from_generator(lambda: iter([{"input_ids": [1]}])),
            {"max_steps": 1},
            "load the dataset without streaming",
        ),
        (
            Dataset.from_list([{"input_ids": [1, 2]}]),
            {"accelerator_config": {"dispatch_batches": True}},
            "accelerator_config.dispatch_batches = True",
        ),
        (
            Dataset.from_list([{"input_ids": [1, 2]}]),
            {"accelerator_config": {"split_batches": True}},
            "accelerator_config.split_batches = True",
        ),
    ],
)
def test_what_would_lose_or_mix_rows_is_refused(
    dataset: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, dataset, **options)
    with pytest.raises(ValueError, match=message):
        trainer.train()


@pytest.mark.parametrize(
    ("rows", "balance", "sizes", "message"),
    [
        ([3, 0, 4, 0], {}, {}, r"2 rows of train_dataset have no tokens .the first is row 1.; rem"),
        ([], {}, {}, "train_dataset has no rows"),
        (
            [3, WINDOW + 1],
            {},
            {},
            r"row 1 of train_dataset has 257 tokens, more than context_window = 256 of Balance; .* "
            r"truncate rows \(max_length of the tokenizer or of SFTConfig\)",
        ),
        ([3], {}, {"accumulation_steps": 0}, "gradient_accumulation_steps = 0 must be at least 1"),
        ([3], {}, {"num_ranks": 0}, "number of processes = 0 must be at least 1"),
        ([3], {"s_max": 9}, {}, "s_max = 9 of Balance must be at least context_window = 256"),
        (
            [3],
            {"step_tokens": 9},
            {"num_ranks": 2, "accumulation_steps": 3},
            r"step_tokens = 9 of Balance must be more than the 1536 tokens .* \(2 processes x "
            r"gradient_accumulation_steps = 3 x context_window = 256\)",
        ),
    ],
)
def test_errors_name_options_of_the_library(
    rows: list[int], balance: dict[str, Any], sizes: dict[str, int], message: str
) -> None:
    made = Balance(**{"context_window": WINDOW, **balance})
    with pytest.raises(ValueError, match=message) as error:
        BalancedBatchSampler(rows, made, **{"num_ranks": 1, **sizes})
    for ours in ("data.", "num_micro_batches", "corpus", "long_documents"):
        assert ours not in str(error.value)
