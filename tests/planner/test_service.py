"""The planner process: order, several clients, resuming, the end, failures, and no torch in it."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.planner.test_compose import planner
from wlb.plan import PlannerState
from wlb.planner import Planner
from wlb.planner.service import PlanClient, PlannerProcess


def broken() -> Planner:
    raise ValueError("no such store: /nowhere")


def planner_without_torch() -> Planner:
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported into the planner process")
    return planner()


@contextmanager
def process(
    make=planner_without_torch, *, clients: int = 1, state: PlannerState | None = None
) -> Iterator[PlannerProcess]:
    made = PlannerProcess(make, (), state=state, ahead=3, num_clients=clients)
    try:
        yield made
    finally:
        made.close()


def test_plans_come_in_order_and_end() -> None:
    expected = list(planner().steps())
    with process() as made:
        client = PlanClient(made.address, 1, ahead=3)
        for plan in expected:
            item = client.next()
            assert item is not None
            assert item[0].digest() == plan.digest()
            assert item[1].digest() == planner().shard(plan, 1).digest()
        assert client.next() is None
        assert client.peek(1) is None
        client.close()


def test_peek_looks_ahead_without_taking() -> None:
    with process() as made:
        client = PlanClient(made.address, 0, ahead=3)
        seen = client.peek(2)
        assert seen is not None
        assert seen[0].step == 1
        first = client.next()
        assert first is not None
        assert first[0].step == 0
        client.close()


def test_clients_may_be_far_apart() -> None:
    """A rank that has not asked yet holds nobody up, and still gets every step."""
    total = len(list(planner().steps()))
    with process(clients=2) as made:
        made_by: dict[int, list[int]] = {}

        def take(pipeline: int) -> None:
            client = PlanClient(made.address, pipeline, ahead=3)
            made_by[pipeline] = []
            while (item := client.next()) is not None:
                assert item[1].pipeline == pipeline
                made_by[pipeline].append(item[0].step)
            client.close()

        threads = [threading.Thread(target=take, args=(d,)) for d in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert made_by == {0: list(range(total)), 1: list(range(total))}


def test_it_goes_on_from_a_state() -> None:
    plans = list(planner().steps())
    with process(state=plans[2].state) as made:
        client = PlanClient(made.address, 0, ahead=3)
        item = client.next()
        assert item is not None
        assert item[0].digest() == plans[3].digest()
        client.close()


def test_a_failure_reaches_every_client_with_its_reason() -> None:
    with process(broken) as made:
        client = PlanClient(made.address, 0, ahead=3)
        with pytest.raises(RuntimeError, match="no such store: /nowhere"):
            client.next()
        client.close()


def test_a_dead_planner_is_named() -> None:
    with process() as made:
        client = PlanClient(made.address, 0, ahead=2)
        assert client.next() is not None
        made.close()
        with pytest.raises(RuntimeError, match="planner process of this node has died"):
            list(iter(client.next, "never"))
        client.close()


def test_the_socket_is_private_and_removed() -> None:
    with process() as made:
        folder = made.address.path.rsplit("/", 1)[0]
        listing = subprocess.run(["ls", "-ld", folder], capture_output=True, text=True, check=True)
        assert listing.stdout.startswith("drwx------")
        PlanClient(made.address, 0, ahead=2).close()
    gone = subprocess.run(["ls", "-ld", folder], capture_output=True, text=True, check=False)
    assert gone.returncode != 0


def test_it_ends_quietly_after_its_last_client(capfd: pytest.CaptureFixture[str]) -> None:
    with process() as made:
        client = PlanClient(made.address, 0, ahead=2)
        assert client.next() is not None
        client.close()
        assert made._process.wait(30) == 0
        assert not Path(made.address.path).parent.exists()
    assert capfd.readouterr().err == ""


ORPHAN = """
import os
from tests.planner.test_service import planner_without_torch
from wlb.planner.service import PlannerProcess

made = PlannerProcess(planner_without_torch, (), state=None, ahead=3, num_clients=2)
print(made._process.pid, made.address.path, flush=True)
os._exit(0)
"""


def test_it_ends_when_its_parent_dies_before_anyone_connects() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=True
    )
    pid, path = done.stdout.split()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(path).parent.exists()
