"""Tests that `wlb.collate` stays importable for one release."""

import pytest

import wlb.collate
from wlb.adapters import collate


@pytest.mark.parametrize("name", wlb.collate.__all__)
def test_a_name_is_the_adapters_object_with_a_warning(name: str) -> None:
    with pytest.warns(FutureWarning, match=r"wlb\.adapters\.collate"):
        assert getattr(wlb.collate, name) is getattr(collate, name)


def test_other_names_are_missing() -> None:
    assert not hasattr(wlb.collate, "wlb")
