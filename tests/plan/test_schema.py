"""Tests schemas made of records, and what does not fit them."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

from wlb.plan import UserError, schema
from wlb.plan.schema import check_schema, schema_of


@dataclass(frozen=True)
class Written:
    lengths: npt.NDArray[np.int64]
    name: str = ""


def test_an_array_is_written_as_a_list_of_whole_numbers() -> None:
    assert schema_of(Written) == {"lengths": [int], "name?": str}


def test_an_array_of_numpy_2_5_is_an_alias_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numpy 2.5 (Python 3.12 and later) defines NDArray by a type statement, whose uses have the
    alias as their origin; importing wlb failed with it.
    """
    alias = object()
    monkeypatch.setattr(schema, "npt", SimpleNamespace(NDArray=alias))
    monkeypatch.setattr(schema, "get_origin", lambda hint: alias)
    assert schema_of(Written, name=str) == {"lengths": [int], "name?": str}


@pytest.mark.parametrize(
    "value", [{"lengths": [1, "2"]}, {"lengths": 1}, {}, {"lengths": [], "x": 1}]
)
def test_what_does_not_fit_is_named(value: object) -> None:
    with pytest.raises(UserError, match=r"file.json: .*; make it again"):
        check_schema(value, schema_of(Written), "file.json", remedy="make it again")
