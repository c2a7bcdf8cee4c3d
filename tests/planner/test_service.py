"""Tests the planner process: order, clients, resuming, the end, failures, and no torch in it."""

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.planner.test_compose import planner
from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, LengthSource
from wlb.packing import PackerOptions, VarLenPacker
from wlb.plan import PlannerState, UserError
from wlb.planner import Planner
from wlb.planner.liveness import Address, PlannerLost, PlanningError
from wlb.planner.service import PlanClient, PlannerProcess

pytestmark = pytest.mark.process


def broken() -> Planner:
    raise UserError("no such store: /nowhere")


def planner_without_torch() -> Planner:
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported into the planner process")
    return planner()


class StopsItsReader:
    """An argument whose reading stops the process that reads it, as SIGSTOP from outside does."""

    def __reduce__(self) -> Any:
        return _stop, ()


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class EndsItsReader:
    """An argument whose reading ends the process that reads it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


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
        client = PlanClient(made.address, 1)
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
        client = PlanClient(made.address, 0)
        seen = client.peek(2)
        assert seen is not None
        assert seen[0].step == 1
        first = client.next()
        assert first is not None
        assert first[0].step == 0
        client.close()


def test_a_rank_that_writes_no_checkpoint_gets_no_state() -> None:
    (expected, *_) = planner().steps()
    with process() as made:
        client = PlanClient(made.address, 0, needs_state=False)
        item = client.next()
        assert item is not None
        plan, _ = item
        client.close()
    assert plan.digest() == expected.digest()
    assert plan.progress.state is None
    assert plan.progress.next_step == expected.state.next_step
    assert plan.progress.num_tokens == expected.state.num_tokens
    with pytest.raises(ValueError, match="the plan of step 0 has no planner state"):
        _ = plan.state


def test_every_client_gets_every_step_of_its_pipeline() -> None:
    total = len(list(planner().steps()))
    with process(clients=2) as made:
        made_by: dict[int, list[int]] = {}

        def take(pipeline: int) -> None:
            client = PlanClient(made.address, pipeline)
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
        client = PlanClient(made.address, 0)
        item = client.next()
        assert item is not None
        assert item[0].digest() == plans[3].digest()
        client.close()


def test_a_failure_reaches_every_client_with_its_reason() -> None:
    with process(broken, clients=2) as made:
        clients = [PlanClient(made.address, d) for d in (0, 1)]
        for client in clients:
            with pytest.raises(RuntimeError, match="no such store: /nowhere"):
                client.next()
            client.close()


def fails_at_step_three(reached: Path) -> Planner:
    """Returns a planner that makes the file `reached` when it needs the batch before the last."""
    made = planner()
    source = made.source.next  # type: ignore[attr-defined]

    def fail(state):
        if state["batch"] == 3:
            raise UserError("the store broke")
        if state["batch"] == 2:
            reached.touch()
        return source(state)

    made.source.next = fail  # type: ignore[attr-defined]
    return made


def test_steps_planned_before_a_failure_still_run(tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    with process(partial(fails_at_step_three, reached)) as made:
        client = PlanClient(made.address, 0)
        end = time.monotonic() + 600
        while not reached.exists():  # it plans ahead, although nobody has asked
            assert time.monotonic() < end, "no step was planned ahead"
            time.sleep(0.01)
        steps = []
        with pytest.raises(RuntimeError, match="the store broke"):  # noqa: PT012
            while (item := client.next()) is not None:
                client.peek(2)  # as training does before it computes the step
                steps.append(item[0].step)
        assert steps == [0, 1, 2]
        client.close()


def large_planner() -> Planner:
    """Returns a planner whose step's message is about 2 MB, ten times what a socket buffers."""
    lengths = np.full(200_000, 7)
    source = GlobalBatches(
        LengthSource(name="many", lengths=lengths), tokens_per_batch=140_000, seed=0, epochs=1
    )
    options = PackerOptions(num_micro_batches=2, context_window=100_000, cost=FlopsWorkload())
    packer = VarLenPacker(options=options, s_max=200_000, queue_thresholds=())
    return Planner(source=source, packer=packer, baseline=None, cost=FlopsWorkload())


def test_a_client_that_does_not_read_holds_nobody_up() -> None:
    with process(large_planner, clients=2) as made:
        quick, slow = (PlanClient(made.address, 0) for _ in range(2))
        for client in (quick, slow):
            first = client.next()
            assert first is not None
            assert len(pickle.dumps(first)) > 1_000_000
        taken = 1
        while quick.next() is not None:
            taken += 1
        assert taken == 10
        assert sum(1 for _ in iter(slow.next, None)) == 9
        quick.close()
        slow.close()


def test_a_client_that_dies_before_its_first_word_holds_nobody_up() -> None:
    with process(clients=2) as made:
        gone = Client(made.address.path, authkey=made.address.key)
        gone.close()
        client = PlanClient(made.address, 0)
        assert client.next() is not None
        client.close()


def test_a_long_temporary_directory_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/scratch/" + "x" * 90)
    assert len(Address.new("a" * 32, 12).path) < 100


def test_a_dead_planner_is_named() -> None:
    with process() as made:
        client = PlanClient(made.address, 0)
        assert client.next() is not None
        made.close()
        with pytest.raises(RuntimeError, match="planner process of this node has died"):
            list(iter(client.next, "never"))
        client.close()


def test_a_stopped_planner_is_named() -> None:
    with process() as made:
        client = PlanClient(made.address, 0, silence_s=1.0)
        assert client.next() is not None
        os.kill(made._process.pid, signal.SIGSTOP)
        said = rf"process {made._process.pid} on .*, state T\) gave no sign of life for 1 s"
        with pytest.raises(PlanningError, match=said):
            list(iter(client.next, "never"))
        client.close()


def test_a_planner_that_is_stopped_before_a_rank_connects_is_named() -> None:
    with process() as made:
        os.kill(made._process.pid, signal.SIGSTOP)
        with pytest.raises(PlanningError, match="gave no sign of life for 1 s"):
            PlanClient(made.address, 0, silence_s=1.0)


def starts(
    *args: object, silence_s: float = 60.0, address: Address | None = None
) -> PlannerProcess:
    return PlannerProcess(
        planner_without_torch,
        args,
        state=None,
        ahead=3,
        num_clients=1,
        address=address,
        silence_s=silence_s,
    )


@pytest.mark.full
@pytest.mark.parametrize("more", [b"", bytes(1 << 22)], ids=["read", "half read"])
def test_a_planner_that_is_stopped_before_it_listens_is_named(more: bytes) -> None:
    """A job of megabytes is more than a pipe takes from a parent whose planner reads no more."""
    address = Address.new()
    with pytest.raises(
        PlannerLost, match="gave no sign of life for 2 s, so it is considered stopped"
    ) as caught:
        starts(StopsItsReader(), more, silence_s=2.0, address=address)
    (pid,) = re.findall(r"process (\d+) on", str(caught.value))
    assert not Path("/proc", pid).exists()
    assert not address.folder.exists()


@pytest.mark.full
def test_more_ranks_than_may_queue_learn_that_a_planner_is_stopped() -> None:
    with process(clients=8) as made:
        os.kill(made._process.pid, signal.SIGSTOP)
        for rank in range(8):
            with pytest.raises(PlannerLost, match="gave no sign of life for 1 s"):
                PlanClient(made.address, rank, silence_s=1.0)


def test_a_planner_that_ends_at_its_start_is_no_broken_pipe() -> None:
    with pytest.raises(PlanningError, match="the planner process ended with exit status 1 before"):
        starts(EndsItsReader(), bytes(1 << 22))


def test_the_socket_is_private_and_removed() -> None:
    with process() as made:
        folder = made.address.path.rsplit("/", 1)[0]
        listing = subprocess.run(["ls", "-ld", folder], capture_output=True, text=True, check=True)
        assert listing.stdout.startswith("drwx------")
        PlanClient(made.address, 0).close()
    gone = subprocess.run(["ls", "-ld", folder], capture_output=True, text=True, check=False)
    assert gone.returncode != 0


def test_it_ends_quietly_after_its_last_client(capfd: pytest.CaptureFixture[str]) -> None:
    with process() as made:
        client = PlanClient(made.address, 0)
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


@pytest.mark.full
def test_it_ends_when_its_parent_dies_before_anyone_connects() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=True
    )
    pid, path = done.stdout.split()
    deadline = time.monotonic() + 600
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(path).parent.exists()
