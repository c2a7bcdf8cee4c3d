"""Damages valid files and holds a reader to what it promises: a result, or a UserError of one line.

A reader may never raise anything else, never take more than `MOST_CPU_S`, and never write a message
that hides its remedy. `fuzzed` chooses how many inputs a set tries: nightly 10,000 a test.
"""

import copy
import json
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from wlb.plan import UserError

MOST_CPU_S = 10.0
MOST_CHARACTERS = 1000
NIGHTLY = 10_000
_INPUTS = {25: 10, 75: 100, 300: NIGHTLY}
"""Inputs a test tries, by the examples of the set's profile (tests/conftest.py)."""

DEEP_LIST = "[" * 2000 + "]" * 2000
DEEP_OBJECT = '{"a":' * 2000 + "0" + "}" * 2000
NUMBERS = [0, -1, 1, 2, 2**31, 2**32, 2**62, 2**63, -(2**63), 10**12, 10**30, 1e300, -1e300, 1e-300]
_WORDS = ["", "x", "\0", "a\nb", "../x", "x" * 5000, "\ud800", "[" * 3000, "1", "true", "\u2028"]
_VALUES: list[Any] = [None, True, False, float("nan"), float("inf"), 0.5, [], {}, [0], {"a": 1}]
VALUES: list[Any] = [*_VALUES, *NUMBERS, *_WORDS, [[[0]]], [1, 2, 3], [-1, -1], ["x"], [None]]
_BYTES = [
    b"\x00",
    b"\xff",
    b"\xff" * 8,
    b"\x00" * 8,
    (2**62).to_bytes(8, "little"),
    b'"',
    b"{",
    b"[",
]


class Hang(BaseException):
    """A reader took longer than `MOST_CPU_S`; no reader catches it."""


class Refused(NamedTuple):
    """A reader raised UserError."""

    message: str


def fuzzed(share: float = 1.0, *, nightly: int = NIGHTLY) -> settings:
    """Settings of a fuzz test. share: of the quick and the full set's inputs, for readers that are
    slow or have many cases. nightly: inputs of the nightly set. Fewer than `NIGHTLY` have the cases
    of a test that has more than `NIGHTLY` in all, and checks from end to end (whole commands, loads
    and epochs), beside which the parsers' own checks have `NIGHTLY`.
    """
    inputs = _INPUTS.get(settings.default.max_examples if settings.default else 25, 150)
    is_nightly = inputs == NIGHTLY
    return settings(
        max_examples=nightly if is_nightly else max(2, round(inputs * share)),
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.function_scoped_fixture,
        ],
    )


@contextmanager
def cpu_limit() -> Generator[None]:
    """Raise `Hang` after `MOST_CPU_S` of this process's own time, which no other load can use."""

    def end(*_: object) -> None:
        raise Hang(f"took more than {MOST_CPU_S} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def outcome(read: Callable[[], Any]) -> Any:
    """What `read` returns, or `Refused`. Any other exception fails the test."""
    with cpu_limit():
        try:
            return read()
        except UserError as error:
            message = str(error)
    assert 0 < len(message) <= MOST_CHARACTERS
    return Refused(message)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` after one to three of: bits flipped, bytes put in, taken out, repeated or cut off."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(out) - 1)))
        length = draw(st.sampled_from([1, 2, 4, 8, 16, 100]))
        match draw(st.sampled_from(["flip", "put", "take", "repeat", "cut", "over"])):
            case "flip" if out:
                out[at] ^= 1 << draw(st.integers(0, 7))
            case "put":
                out[at:at] = draw(st.sampled_from(_BYTES))
            case "take":
                del out[at : at + length]
            case "repeat":
                out[at:at] = out[at : at + length]
            case "cut":
                del out[at:]
            case _:
                value = draw(st.sampled_from(_BYTES))
                out[at : at + len(value)] = value
    return bytes(out)


def places_of(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value inside `value`; of long lists to the first and the last."""
    found = [place]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places_of(inner, (*place, key))
    elif isinstance(value, list):
        for i in sorted({0, len(value) - 1}) if value else ():
            found += places_of(value[i], (*place, i))
    return found


@st.composite
def misshapen(draw: st.DrawFn, value: Any) -> str:
    """JSON text of `value` with one to three values replaced, removed, added or nested deeply."""
    out = [copy.deepcopy(value)]
    marks: dict[str, str] = {}
    for _ in range(draw(st.integers(1, 3))):
        places = places_of(out[0])
        place = (0, *draw(st.sampled_from(places)))
        holder: Any = out
        for step in place[:-1]:
            holder = holder[step]
        match draw(st.sampled_from(["replace", "replace", "remove", "rename", "nest"])):
            case "replace":
                holder[place[-1]] = copy.deepcopy(draw(st.sampled_from(VALUES)))
            case "remove" if len(place) > 1:
                del holder[place[-1]]
            case "rename" if isinstance(holder, dict):
                holder[draw(st.sampled_from(["x", "", place[-1] + "2"]))] = holder.pop(place[-1])
            case "nest":
                mark = f"@{len(marks)}@"
                marks[mark] = draw(st.sampled_from([DEEP_LIST, DEEP_OBJECT, "9" * 5000, "1e999"]))
                holder[place[-1]] = mark
            case _:
                pass
    text = json.dumps(out[0])
    for mark, deep in marks.items():
        text = text.replace(json.dumps(mark), deep)
    if draw(st.booleans()) and text.startswith("{") and (start := text.find('"')) > 0:
        end = text.find(",")
        if draw(st.booleans()) and end > start:
            text = "{" + text[start:end] + "," + text[1:]  # a key twice
    return text
