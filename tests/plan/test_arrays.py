"""Tests integer arrays and their digest."""

import numpy as np
import pytest

from wlb.plan import digest, int_array


def test_digest_sees_bytes_order_and_kind() -> None:
    a, b = int_array("a", [1, 2]), int_array("b", [2, 1])
    assert digest(a) == digest(int_array("again", np.array([1, 2], np.int32)))
    assert len({digest(a), digest(b), digest(a, b), digest(b, a), digest("1"), digest(1)}) == 6
    assert digest(a) < 2**60


@pytest.mark.parametrize("values", [[True, 3], (3, False), [True], np.array([True])])
def test_truth_values_are_no_numbers(values) -> None:
    with pytest.raises(ValueError, match=r"True or False|has dtype bool"):
        int_array("n", values)


@pytest.mark.parametrize("values", [[1e300], [float(2**63)], np.array([2**63 + 5], np.uint64)])
def test_numbers_beyond_64_bits_are_refused(values) -> None:
    with pytest.raises(ValueError, match="must fit in a signed 64-bit integer"):
        int_array("n", values)
