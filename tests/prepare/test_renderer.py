"""Tests the process that renders chat templates: its limits, and that it goes on after them."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prepare.chat_case import CHATML_TOKENS, byte_tokenizer
from wlb.plan import UserError
from wlb.prepare import ChatEncoder, ChatTemplate, Turns, renderer
from wlb.prepare.conversation import conversation_of
from wlb.prepare.load_template import CHATML

SAID = conversation_of({"prompt": "Hi", "completion": "Yo"})


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process under limits that are reached soon."""
    renderer.renderer().close()
    monkeypatch.setattr(renderer, "MOST_CPU_S", 1)
    monkeypatch.setattr(renderer, "MOST_BYTES", 1 << 29)
    yield
    renderer.renderer().close()


def text_of(source: str) -> str:
    return ChatTemplate(source, name="bad", variables={}).render(SAID, Turns.ALL).text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "cannot be used: rendering takes more than 1 s of CPU time; use a simpler template",
        ),
        ("{{ 'a'|center(1000000000) }}", "the template needs more memory than a rendering may"),
    ],
)
@pytest.mark.usefixtures("limited")
def test_a_template_without_end_is_refused_and_the_next_one_rendered(
    source: str, reason: str
) -> None:
    with pytest.raises(UserError, match=f"chat template bad .*{reason}"):
        text_of(source + CHATML.source)
    assert text_of(CHATML.source) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo" + (
        "<|im_end|>\n"
    )


@pytest.mark.usefixtures("limited")
def test_each_rendering_has_the_whole_limit() -> None:
    """The kernel counts the time of the process, which renders many templates."""
    busy = "{% for a in range(30) %}{% for b in range(20000) %}{% endfor %}{% endfor %}"
    for _ in range(20):
        assert text_of(busy + CHATML.source).endswith("Yo<|im_end|>\n")


def test_an_ended_process_is_started_again() -> None:
    encoder = ChatEncoder(byte_tokenizer(CHATML_TOKENS), CHATML)
    before = encoder.encode(SAID).tokens.tolist()
    renderer.renderer().close()
    assert encoder.encode(SAID).tokens.tolist() == before


def is_left(pid: int) -> bool:
    """Whether there is a process of this number, be it one whose end nobody has read."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pid_of_the_process() -> int:
    process = renderer.renderer()._process
    assert process is not None
    return process.pid


@pytest.mark.process
def test_a_process_that_is_killed_from_outside_leaves_none_behind() -> None:
    text_of(CHATML.source)
    pid = pid_of_the_process()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"was killed \(SIGKILL\).*run the same"):
        text_of(CHATML.source)
    assert not is_left(pid)
    assert text_of(CHATML.source)


@pytest.mark.process
@pytest.mark.usefixtures("limited")
def test_a_process_that_runs_out_of_time_leaves_none_behind() -> None:
    text_of(CHATML.source)
    pid = pid_of_the_process()
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match="takes more than 1 s of CPU time"):
        text_of(endless)
    assert not is_left(pid)


@pytest.mark.process
def test_a_process_ends_with_the_one_that_asks_it() -> None:
    """Its input ends then, also where the one that asks it was killed."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        text_of(CHATML.source)
        os.write(write, str(pid_of_the_process()).encode())
        signal.pause()
    pid = int(os.read(read, 100))
    assert is_left(pid)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for _ in range(1000):
        if not is_running(pid):
            break
        time.sleep(0.02)
    assert not is_running(pid)
    os.close(read)
    os.close(write)


def is_running(pid: int) -> bool:
    """Whether a process runs that another one than this has to read the end of."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.process
def test_a_fork_has_a_process_of_its_own() -> None:
    assert text_of(CHATML.source)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, str(len(text_of(CHATML.source))).encode())
        os._exit(0)
    assert text_of(CHATML.source)
    assert os.waitpid(child, 0)[1] == 0
    assert int(os.read(read, 100)) == len(text_of(CHATML.source))
    os.close(read)
    os.close(write)
