"""Tests length-only sources, and the family that reproduces the paper."""

import numpy as np
import pytest

from wlb.data import FAMILIES, LengthFamily, LengthSource, lengths_of_family


def test_source_checks_its_lengths():
    with pytest.raises(ValueError, match="mine: length 1 is 0"):
        LengthSource(name="mine", lengths=np.array([1, 0]))


@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_a_list_may_hold_whole_floats_of_any_type(kind):
    assert LengthSource(name="mine", lengths=[kind(12), 3]).lengths.tolist() == [12, 3]
    with pytest.raises(ValueError, match=r"mine: length 0 is .*2.5.*, but must be a whole number"):
        LengthSource(name="mine", lengths=[kind(2.5)])


@pytest.mark.parametrize("window", [4096, 131072])
def test_paper_family_has_its_shares_of_tokens(window):
    source = lengths_of_family("wlb_paper", window=window, num_documents=400_000, seed=1)
    lengths, total = source.lengths, source.num_tokens
    assert 1 <= lengths.min() <= lengths.max() == window
    assert np.median(lengths) == pytest.approx(750 / 131072 * window, rel=0.04)
    assert lengths[lengths < window / 2].sum() / total == pytest.approx(0.78, abs=0.02)
    assert lengths[lengths == window].sum() / total == pytest.approx(0.146, abs=0.01)
    body, tail, atom = FAMILIES["wlb_paper"].document_shares
    assert body + tail + atom == pytest.approx(1)
    assert (lengths == window).mean() == pytest.approx(atom, rel=0.05)


@pytest.mark.parametrize("tail_exponent", [0.5, 1.0, 1.0001, 2.5])
def test_family_shares_hold_for_any_tail(tail_exponent):
    family = LengthFamily(
        body_median=0.01,
        body_sigma=0.5,
        tail_start=0.2,
        tail_exponent=tail_exponent,
        tail_token_share=0.5,
        window_token_share=0.2,
    )
    lengths = family.sample(300_000, window=1_000_000, seed=0)
    total = lengths.sum()
    assert lengths[lengths < 1e5].sum() / total == pytest.approx(0.3, abs=0.015)
    assert lengths[lengths == 1e6].sum() / total == pytest.approx(0.2, abs=0.015)


def test_family_is_seeded():
    def draw(seed):
        return lengths_of_family(window=1000, num_documents=50, seed=seed).lengths.tolist()

    assert draw(1) == draw(1) != draw(2)
    assert (
        LengthFamily(tail_token_share=0, window_token_share=1).sample(3, window=9, seed=0).tolist()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"body_median": 1.5}, r"body_median = 1.5 must be above 0 and below 1"),
        ({"tail_start": float("nan")}, "tail_start = nan"),
        ({"body_sigma": 0}, "body_sigma = 0 must be above 0"),
        ({"tail_exponent": -1}, "tail_exponent = -1 must be above 0"),
        ({"tail_token_share": 0.9, "window_token_share": 0.2}, "their sum must be at most 1"),
        ({"window_token_share": float("nan")}, "their sum must be at most 1"),
    ],
)
def test_family_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        LengthFamily(**options)


def test_sampling_refuses():
    with pytest.raises(
        ValueError, match=r"'x' is not a distribution of document lengths; use one of wlb_paper"
    ):
        lengths_of_family("x", window=9, num_documents=1, seed=0)
    with pytest.raises(ValueError, match="num_documents = 0"):
        lengths_of_family(window=9, num_documents=0, seed=0)
    with pytest.raises(ValueError, match="window = 1 must"):
        lengths_of_family(window=1, num_documents=1, seed=0)
