"""Tests that a run on one machine opens no port that another machine can reach."""

import ipaddress
import json
import os
import socket
from functools import partial
from pathlib import Path

import pytest

from tests.launch.ports import descendants, listening
from tests.train.case import job_of, relaid, small_spec, write_corpus
from tests.train.faults.test_recorded_rank_broken import rank_main
from wlb.launch.local import run_local


def note_ports(launcher: int, path: Path) -> None:
    path.write_text(json.dumps(listening(descendants(launcher))))


def test_a_listening_socket_is_found() -> None:
    for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        try:
            opened = socket.create_server((host, 0), family=family)
        except OSError:
            continue  # a machine without IPv6
        with opened:
            assert (host, opened.getsockname()[1]) in listening({os.getpid()})


@pytest.mark.full
@pytest.mark.dist
def test_local_ranks_listen_on_loopback_alone(tmp_path: Path) -> None:
    """In the middle of a step of four ranks: Gloo's groups alone."""
    corpus, found = write_corpus(tmp_path / "texts"), tmp_path / "ports.json"
    training = {"steps": 3}
    job = job_of(relaid(small_spec(tmp_path, corpus, training=training), "cp2-pp2"))
    how = partial(note_ports, os.getpid(), found)
    run_local(rank_main, 4, job, (0,), how, timeout_s=600)
    ports = json.loads(found.read_text())
    # Each rank has a Gloo device for training and one for the planner's and saver's groups.
    assert len(ports) >= 4
    assert [(h, port) for h, port in ports if not ipaddress.ip_address(h).is_loopback] == []
