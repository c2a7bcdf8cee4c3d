"""Tests padding waste: strategies by hand, FLOPs and money against other reckonings, the claims."""

from pathlib import Path

import numpy as np
import pytest

from experiments.paper.padding_waste import __main__ as page
from experiments.paper.padding_waste import money
from experiments.paper.padding_waste.claims import ROW, claims, most_of_a_row_each
from experiments.paper.padding_waste.corpora import BOOKS, CODE, WEB, corpora
from experiments.paper.padding_waste.money import job
from experiments.paper.padding_waste.strategies import Filled, Strategy, fill, pieces_of
from wlb.cost import document_flops

pytestmark = pytest.mark.full

PACKERS = (Strategy.FIRST_FIT_DECREASING, Strategy.BEST_FIT_DECREASING, Strategy.STREAM)


@pytest.fixture(scope="module")
def web() -> dict[Strategy, Filled]:
    lengths = WEB.shuffled(0)
    return {strategy: fill(strategy, lengths, row=ROW) for strategy in Strategy}


@pytest.mark.parametrize(
    ("strategy", "rows", "positions", "pairs"),
    [
        # Pieces 3, 4, 1, 2 of documents 3, 5, 2 in rows of 4: whole, 6 + 10 + 1 + 3 = 20 pairs.
        (Strategy.ROW_EACH, 4, 16, 40),
        (Strategy.BATCH_PADDING, 4, 16, 40),
        (Strategy.SORTED_BATCH_PADDING, 4, 16, 40),
        (Strategy.NEXT_FIT, 3, 12, 20 + 1 + 0 + 1),  # 3 | 4 | 1, 2: padding of 1, 0, 1
        (Strategy.NEXT_FIT_SORTED, 3, 12, 20 + 1 + 1),  # 1, 2 | 3 | 4
        (Strategy.FIRST_FIT_DECREASING, 3, 12, 20 + 3),  # 4 | 3, 1 | 2: padding of 2
        (Strategy.BEST_FIT_DECREASING, 3, 12, 20 + 3),
        (Strategy.VARIABLE, 3, 10, 20),
        (Strategy.STREAM, 3, 12, 6 + 1 + 10 + 3 + 3),  # 3, 1 | 4 | 2: the 5 is split 1, 4
    ],
)
def test_strategies_by_hand(strategy: Strategy, rows: int, positions: int, pairs: int) -> None:
    made = fill(strategy, np.array([3, 5, 2]), row=4)
    assert (made.rows, made.positions, made.tokens) == (rows, positions, 10)
    assert (made.num_split, made.num_cut, made.lost) == (1, 0, 0)
    assert made.utilisation == 10 / positions
    assert made.pairs == pairs


def test_batches_are_padded_to_their_longest_not_to_the_row() -> None:
    lengths = np.array([1, 2] * 32)
    mixed = fill(Strategy.BATCH_PADDING, lengths, row=4)
    assert (mixed.positions, mixed.pairs) == (64 * 2, 64 * 3)
    alike = fill(Strategy.SORTED_BATCH_PADDING, lengths, row=4)  # 32 of 1, then 32 of 2
    assert (alike.positions, alike.pairs) == (96, 32 * 1 + 32 * 3)


def test_truncating_loses_what_is_over_and_says_so() -> None:
    made = fill(Strategy.TRUNCATED, np.array([3, 5, 2]), row=4)
    assert (made.rows, made.tokens, made.lost, made.num_split) == (3, 9, 1, 1)
    assert made.waste == 0.25


def test_documents_that_row_ends_cut_are_counted() -> None:
    made = fill(Strategy.STREAM, np.array([3, 3, 2, 9]), row=4)
    assert (made.num_cut, made.num_split, made.rows) == (1, 1, 5)
    assert pieces_of(np.array([9, 4]), 4).tolist() == [4, 4, 1, 4]


def test_rows_of_variable_length_are_filled_to_the_quantum() -> None:
    made = fill(Strategy.VARIABLE_QUANTUM, np.array([100, 200]), row=4096)
    assert (made.positions, made.tokens) == (384, 300)
    assert made.pairs == (100 * 101 + 200 * 201 + 84 * 85) // 2


def test_no_strategy_but_truncating_loses_a_token(web: dict[Strategy, Filled]) -> None:
    total = int(WEB.lengths().sum())
    for strategy, made in web.items():
        assert made.tokens + made.lost == total
        assert bool(made.lost) == (strategy == Strategy.TRUNCATED)
        assert made.tokens <= made.positions
    for strategy in PACKERS:
        assert web[strategy].rows == -(-total // ROW)
    assert web[Strategy.VARIABLE].waste == 0


def test_the_means_are_the_article_s() -> None:
    means = [corpus.mean for corpus in corpora(seed=0, files=[], with_stdlib=False)]
    assert means == pytest.approx([800, 300, 50_000], rel=1e-5)
    assert [d.title for d in (WEB, CODE, BOOKS)] == ["web-like", "code-like", "books-like"]


@pytest.mark.parametrize("row", page.ROWS)
def test_a_row_each_is_never_fuller_than_mean_over_row(row: int) -> None:
    lengths = WEB.lengths()
    for strategy in (Strategy.ROW_EACH, Strategy.TRUNCATED):
        assert fill(strategy, lengths, row=row).utilisation <= lengths.mean() / row


def test_padding_is_what_the_notes_have(web: dict[Strategy, Filled]) -> None:
    assert web[Strategy.TRUNCATED].utilisation == pytest.approx(0.177, abs=0.001)
    assert web[Strategy.SORTED_BATCH_PADDING].utilisation == pytest.approx(0.999, abs=0.001)
    assert web[Strategy.NEXT_FIT_SORTED].utilisation == pytest.approx(0.847, abs=0.004)
    assert 0.81 < web[Strategy.NEXT_FIT].utilisation < 0.84
    assert web[Strategy.FIRST_FIT_DECREASING].utilisation > 0.9999


def test_flops_of_rows_without_padding_are_those_of_the_documents() -> None:
    lengths = np.array([100, 900, 2048])
    made = fill(Strategy.VARIABLE, lengths, row=4096)
    expected = document_flops(job().spec.model, lengths).sum() / lengths.sum()
    assert job().flops_per_token(made) == pytest.approx(expected)
    # Four rows of 4,096 attend and compute as four documents of that length.
    padded = fill(Strategy.ROW_EACH, np.array([100, 900, 2048, 4096]), row=4096)
    whole = document_flops(job().spec.model, np.full(4, 4096)).sum()
    assert job().flops_per_token(padded) * padded.tokens == pytest.approx(whole)


def test_money_is_gpu_hours() -> None:
    made = fill(Strategy.VARIABLE, np.array([2048]), row=4096)
    seconds = 1e12 / job().tokens_per_s(made)  # on 8 GPUs
    assert job().usd(made) == pytest.approx(seconds * 8 / 3600 * 2)
    assert job().days(made) == pytest.approx(seconds * 8 / 1024 / 86400)
    assert job().mfu_of(made, 2 * job().usd(made)) == pytest.approx(money.MFU / 2)
    assert money.usd_a_day() == 2048 * 24 * 2
    assert money.mask_bytes(131072) == 16 * 2**30
    assert money.mask_bytes(131072, bytes_per_entry=4) == 64 * 2**30
    assert money.cu_seqlens_bytes(3) == 16


def test_claims_have_a_number_and_a_sentence_each(web: dict[Strategy, Filled]) -> None:
    found = {claim.what: claim for claim in claims(web, job())}
    assert all(claim.ours and claim.verdict.endswith(".") for claim in found.values())
    assert most_of_a_row_each() == 800 / 4096
    naive = found["utilisation, a row each"]
    assert naive.claimed == "38.2%"
    assert naive.verdict.startswith("Impossible: with a mean of 800")
    assert float(naive.ours.rstrip("%")) < 19.5
    a_day = found["USD a day of 30% padding on 2,048 GPUs at 2 USD an hour"]
    assert (a_day.claimed, a_day.ours) == ("1,200,000", "29,491")
    assert found["bool mask of 128K x 128K"].ours == "16 GiB"
    assert found["useful throughput, packing over a row each"].ours == "5.3x"
    assert found["tokens of five documents that fill a row of 4,096"].ours == "3,996"


def test_a_quick_run_takes_files_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("1024\n5000\n")
    monkeypatch.setattr("sys.argv", ["padding_waste", "--quick", "--lengths", str(path)])
    monkeypatch.setattr(page, "write_results", lambda *_, **__: pytest.fail("wrote results"))
    page.main()
    out = capsys.readouterr().out
    for word in ("Claimed and computed", "mine.txt", "books-like", "LLaMA2-7B"):
        assert word in out
    assert "standard library" not in out


def test_pictures_are_drawn(web: dict[Strategy, Filled]) -> None:
    assert page.draw_waste(corpora(seed=0, files=[], with_stdlib=False))
    assert page.draw_strategies(web, job())
