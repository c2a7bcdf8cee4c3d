"""Marks single cases of a parametrized test."""

from typing import Any

import pytest


def full(*cases: object) -> list[Any]:
    """Marks cases that the quick set leaves out.

    A test with several parameters has tuples as cases. Example:
    `parametrize("case", [Case(tp=2), *full(Case(tp=4), Case(tp=2, cp=2))])`
    """
    return _marked(pytest.mark.full, cases)


def nightly(*cases: object) -> list[Any]:
    """Marks cases that only the nightly set runs (see `full`)."""
    return _marked(pytest.mark.nightly, cases)


def _marked(mark: pytest.MarkDecorator, cases: tuple[object, ...]) -> list[Any]:
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark) for case in cases
    ]
