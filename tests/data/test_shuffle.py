"""Tests the permutation: literal values, a bijection for every n, and mixing."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.data.shuffle import permute, unpermute


def test_literal_orders_never_change():
    """A checkpoint's stream depends on these values: they hold on every machine and release."""
    assert permute(range(10), 10, 0, 0).tolist() == [8, 1, 0, 4, 5, 6, 9, 2, 3, 7]
    assert permute(range(10), 10, 0, 1).tolist() == [5, 3, 1, 4, 9, 2, 0, 8, 7, 6]
    assert permute(range(10), 10, 7, 0).tolist() == [7, 4, 8, 9, 5, 2, 1, 3, 6, 0]
    assert permute([0, 1, 2, 999_999, 2**40], 2**40 + 1, 42, 3).tolist() == [
        259380184492,
        760486072299,
        704329814959,
        1043752772310,
        349314913272,
    ]


@given(
    n=st.one_of(st.integers(1, 40), st.integers(1, 5000)),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
)
def test_is_a_bijection(n, seed, epoch):
    out = permute(np.arange(n), n, seed, epoch)
    assert np.array_equal(np.sort(out), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 2**20 - 1, 2**20, 2**20 + 1])
def test_is_a_bijection_around_powers_of_two(n):
    assert np.array_equal(np.bincount(permute(np.arange(n), n, 3, 1), minlength=n), np.ones(n))


@given(n=st.integers(1, 2**62), data=st.data())
def test_large_n_stays_inside_and_distinct(n, data):
    index = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=20))
    out = permute(index, n, 1, 2).tolist()
    assert all(0 <= i < n for i in out)
    assert len(set(out)) == len(index)


@given(n=st.integers(1, 2**62), seed=st.integers(-(2**70), 2**70), data=st.data())
def test_the_inverse_leads_back(n, seed, data):
    index = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    epochs = data.draw(
        st.lists(st.integers(0, 2**40), min_size=len(index), max_size=len(index)) | st.just([3])
    )
    epoch = epochs if len(epochs) == len(index) else epochs[0]
    assert unpermute(permute(index, n, seed, epoch), n, seed, epoch).tolist() == index


@given(n=st.integers(1, 300), epochs=st.lists(st.integers(0, 5), min_size=1, max_size=50))
def test_an_epoch_per_index_equals_epochs_apart(n, epochs):
    index = np.arange(len(epochs)) % n
    expected = [int(permute([i], n, 9, e)[0]) for i, e in zip(index, epochs, strict=True)]
    assert permute(index, n, 9, epochs).tolist() == expected


def test_small_n_reaches_every_order_equally():
    for n, num_orders in ((2, 2), (3, 6), (4, 24)):
        found = [tuple(permute(np.arange(n), n, seed).tolist()) for seed in range(100 * num_orders)]
        assert set(found) == set(permutations(range(n)))
        counts = [found.count(order) for order in set(found)]
        assert 60 < min(counts) <= max(counts) < 145  # 100 expected, standard deviation 10


@pytest.mark.parametrize("n", [10, 100])
def test_every_index_goes_everywhere(n):
    """Chi-square per degree of freedom is taken over 4,000 epochs, of images and of pairs of
    images.
    """
    epochs = 4000
    index = np.tile(np.arange(n), epochs)
    out = permute(index, n, 5, np.repeat(np.arange(epochs), n))
    counts = np.zeros((n, n))
    np.add.at(counts, (index, out), 1)
    assert 0.75 < ((counts - epochs / n) ** 2 / (epochs / n)).sum() / (n - 1) ** 2 < 1.25
    pairs = np.zeros((n, n))
    orders = out.reshape(epochs, n)
    np.add.at(pairs, (orders[:, 0], orders[:, 1]), 1)
    expected = epochs / (n * (n - 1))
    off_diagonal = pairs[~np.eye(n, dtype=bool)]
    chi2 = ((off_diagonal - expected) ** 2 / expected).sum() / (n * (n - 1) - 1)
    assert 0.6 < chi2 < 1.4


def test_neighbours_do_not_stay_neighbours():
    n = 100_000
    out = permute(np.arange(n), n, 1)
    assert (np.abs(np.diff(out)) == 1).sum() < 12  # 2 expected
    assert np.abs(np.corrcoef(np.arange(n), out)[0, 1]) < 0.02
    runs = np.diff(np.sort(out[:1000]))  # the first 1% are spread over all of [0, n)
    assert runs.max() < 1500
    assert (out == np.arange(n)).sum() < 10


def test_seeds_and_epochs_give_unrelated_orders():
    n = 10_000
    base = permute(np.arange(n), n, 1, 0)
    for seed, epoch in ((2, 0), (1, 1), (0, 1), (1 + 2**32, 0)):
        assert (permute(np.arange(n), n, seed, epoch) == base).sum() < 12  # 1 expected


@pytest.mark.parametrize(
    ("index", "n", "message"),
    [
        ([0], 0, "n = 0, the size of a permutation, must be"),
        ([3], 3, "index 3 is outside"),
        ([-1], 3, "index -1"),
    ],
)
def test_refuses(index, n, message):
    with pytest.raises(ValueError, match=message):
        permute(index, n, 0)


def test_nothing_of_nothing():
    assert permute([], 5, 0).tolist() == []
