"""Provides a corpus, and a finished run with checkpoints after 2, 4 and 6 steps."""

from pathlib import Path

import pytest

from tests.train.case import Run, train, write_corpus
from tests.train.checkpoint.case import spec_of


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trains 6 steps on one rank, with checkpoints after 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    return train(spec_of(folder, corpus))[0]
