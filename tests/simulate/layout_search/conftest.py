"""Reduces the memory that is set aside on the small devices of layout-search tests."""

import pytest

from wlb.memory import budget


@pytest.fixture(autouse=True)
def little_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets aside 5% of a device's memory. The usual amounts would exceed these small devices."""
    monkeypatch.setattr(budget, "CONTEXT_GIB", 0.0)
    monkeypatch.setattr(budget, "COMMUNICATOR_GIB", 0.0)
    monkeypatch.setattr(budget, "ALLOCATOR_GAPS", 0.05)
