"""Tests that numbers and sizes are those that are written in digits 0 to 9."""

import math

import pytest

from wlb.plan.numerals import real_of, size_of, whole_of

NO_NUMBERS = ["", " 1", "1 ", "1_000", "²", "١٢", "0x10", "one", "--1", "1" * 5000]


def test_numbers() -> None:
    assert [whole_of(text) for text in ("0", "007", "-3", "+4")] == [0, 7, -3, 4]
    assert [real_of(text) for text in ("1", "-.5", "2.", "1e-3", "+1E3")] == [1, -0.5, 2, 1e-3, 1e3]
    assert real_of("inf") == real_of("Infinity") == math.inf


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_number_is_refused(text: str) -> None:
    for read in (whole_of, real_of):
        with pytest.raises(ValueError, match="number"):
            read(text)


@pytest.mark.parametrize("text", ["1.5", "1e3", "inf"])
def test_a_whole_number_has_digits_alone(text: str) -> None:
    real_of(text)
    with pytest.raises(ValueError, match="is not a whole number"):
        whole_of(text)


def test_sizes() -> None:
    assert size_of("5GB") == 5 * 10**9
    assert size_of("1.5 MiB") == 3 << 19
    assert size_of("100") == size_of("100b") == 100
    assert size_of("9007199254740993") == 2**53 + 1
    for text in (*NO_NUMBERS, "GB", "5XB", "-1GB", "five"):
        with pytest.raises(ValueError, match="write a size such as 5GB, 500MB or 2GiB, or a"):
            size_of(text)
    for text in ("0", "0.1B", "99999999999999999999", "9999999999TB"):
        with pytest.raises(ValueError, match="must be at least 1 byte and at most"):
            size_of(text)
