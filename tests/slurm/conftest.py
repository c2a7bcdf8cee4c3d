"""Starts a Slurm of 32 nodes for the tests of this folder, which are skipped if it cannot start.

With WLB_SLURM=required in the environment, as in .ci/run, they fail instead.
"""

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing

NUM_NODES = 32


@pytest.fixture(scope="session")
def slurm() -> None:
    """Skips or fails a test if Slurm cannot be started on this machine."""
    why = missing()
    if why and os.environ.get("WLB_SLURM") == "required":
        pytest.fail(f"WLB_SLURM=required, but a real Slurm {why}")
    if why:
        pytest.skip(f"a real Slurm {why}")


@pytest.fixture(scope="session")
def cluster(slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with Cluster(folder=folder, num_nodes=NUM_NODES) as started:
        yield started
