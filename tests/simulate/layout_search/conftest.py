"""All but 5% of a searched device's memory is left to tensors."""

import pytest

from wlb.memory import budget


@pytest.fixture(autouse=True)
def little_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The searched model is small, and so is its device: usual amounts would exceed it."""
    monkeypatch.setattr(budget, "CONTEXT_GIB", 0.0)
    monkeypatch.setattr(budget, "COMMUNICATOR_GIB", 0.0)
    monkeypatch.setattr(budget, "ALLOCATOR_GAPS", 0.05)
