"""Marks single cases of a parametrized test."""

from typing import Any

import pytest


def full(*cases: object) -> list[Any]:
    """Marks cases that the quick set leaves out; of several arguments, a case is a tuple of values.

    `parametrize("case", [Case(tp=2), *full(Case(tp=4), Case(tp=2, cp=2))])`
    """
    return _marked(pytest.mark.full, cases)


def nightly(*cases: object) -> list[Any]:
    """Marks cases that the full set leaves out as well; see `full`."""
    return _marked(pytest.mark.nightly, cases)


def _marked(mark: pytest.MarkDecorator, cases: tuple[object, ...]) -> list[Any]:
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark) for case in cases
    ]
