"""Damages valid files and checks that a reader returns a result or raises a UserError.

A reader must not raise any other exception, and must not take more than `MOST_CPU_S`. The message
of a UserError must not be longer than `MOST_CHARACTERS`, because a long message hides its remedy.
`fuzzed` sets the number of inputs; the nightly set tries 10,000 per test.
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
"""Inputs of a test, by the number of examples of property tests in its set (tests/conftest.py)."""

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
    """A reader took longer than `MOST_CPU_S`. As a BaseException it is not caught by readers."""


class Refused(NamedTuple):
    """The result of a reader that raised UserError."""

    message: str


def fuzzed(share: float = 1.0, *, nightly: int = NIGHTLY) -> settings:
    """Returns the settings of a fuzz test.

    Args:
        share: Share of the usual inputs in the quick and the full set, for tests that are slow or
            have many cases.
        nightly: Inputs in the nightly set. Tests with many cases, and tests of whole commands, have
            fewer than `NIGHTLY`; tests of the parsers alone have `NIGHTLY`.
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
    """Raises `Hang` after `MOST_CPU_S` of this process's CPU time.

    CPU time does not depend on the load of the machine.
    """

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
    """Returns the result of `read`, or `Refused` if it raises UserError.

    Any other exception fails the test.
    """
    with cpu_limit():
        try:
            return read()
        except UserError as error:
            message = str(error)
    assert 0 < len(message) <= MOST_CHARACTERS
    return Refused(message)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Draws a damaged copy of bytes.

    One to three times, a bit is flipped, or bytes are inserted, removed, repeated, overwritten or
    cut off.
    """
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
    """Returns the paths to all values inside a JSON value; in lists, only to the first and last."""
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
    """Draws JSON text in which one to three values are replaced, removed, renamed or nested."""
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
