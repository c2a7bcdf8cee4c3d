"""Tests frames: messages survive any cutting of the stream, and other bytes are refused."""

import asyncio
import itertools
import json
import socket
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.launch.wire import (
    MOST_TOKEN_BYTES,
    WELCOME,
    FrameDecoder,
    FrameError,
    Line,
    Member,
    Strangers,
    admit,
    introduction,
    pack,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(), of, max_size=3),
    max_leaves=10,
)


@given(messages=st.lists(JSON, max_size=5), cuts=st.lists(st.integers(0, 300)))
def test_messages_survive_any_cutting(messages: list[Any], cuts: list[int]) -> None:
    stream = b"".join(map(pack, messages))
    bounds = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    decoder, found = FrameDecoder(), list[Any]()
    for start, stop in itertools.pairwise(bounds):
        found += decoder.feed(stream[start:stop])
    assert found == messages


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_or_waited_for(data: bytes) -> None:
    """A decoder raises FrameError and nothing else, and keeps no more than a frame."""
    decoder = FrameDecoder(100)
    try:
        found = list(decoder.feed(data))
    except FrameError:
        return
    assert sum(len(pack(message)) > 0 for message in found) == len(found)
    assert len(decoder._bytes) < struct.calcsize(">I") + 100


def test_a_message_that_is_too_long_is_refused_by_its_length_alone() -> None:
    with pytest.raises(FrameError, match="101 bytes, 100 are allowed"):
        list(FrameDecoder(100).feed(struct.pack(">I", 101)))


class Heard:
    """Notes what a member's aggregator is told."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def joined(self, member: Member) -> None:
        self.said.append(("joined", member.ranks, member.name))

    def heard(self, member: Member, updates: dict[str, Any]) -> None:
        self.said.append(("heard", updates))

    def lost(self, member: Member) -> None:
        self.said.append("lost")


class Transport(asyncio.Transport):
    """Notes whether the connection was ended."""

    is_ended = False

    def abort(self) -> None:
        self.is_ended = True


TOO_MANY = 150


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "said",
    [b"", pack("x" * 200)[:-1], struct.pack(">I", 2**31), b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096],
    ids=["nothing", "half a token", "a length", "http", "zeros"],
)
def test_many_strangers_leave_room_and_no_bytes(said: bytes) -> None:
    """Oldest first: what remains is bounded, and a peer of the job still gets in."""

    async def run() -> None:
        listener, strangers = Heard(), Strangers(2)
        listening = socket.create_server(("127.0.0.1", 0), backlog=TOO_MANY)
        address = listening.getsockname()
        door = asyncio.ensure_future(admit(listening, "the token", listener, strangers))
        try:
            ends = []
            for _ in range(TOO_MANY):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(said)
                ends.append((reader, writer))
            most = 2 + 16
            gone = ends[:-most]
            assert all(await asyncio.gather(*(is_closed(reader) for reader, _ in gone)))
            assert len(strangers) <= most
            assert strangers.num_kept <= most * (4 + MOST_TOKEN_BYTES)
            reader, writer = await asyncio.open_connection(*address)
            writer.write(introduction("the token", {0: "here"}, name="") + pack({0: {}}))
            while len(listener.said) < 2:
                await asyncio.sleep(0)
            assert listener.said == [("joined", {0: "here"}, ""), ("heard", {"0": {}})]
            assert strangers.num_known == 1
            for _, each in [*ends, (reader, writer)]:
                each.close()
            while strangers.num_known or len(strangers):
                await asyncio.sleep(0)
            assert listener.said[-1] == "lost"
        finally:
            door.cancel()

    asyncio.run(asyncio.wait_for(run(), 600))


def test_a_connection_that_is_gone_is_forgotten() -> None:
    """A timer that still ran would keep all that it holds for half a minute."""

    async def connect() -> None:
        strangers = Strangers(1)
        member = Member("token", Heard(), strangers)
        member.connection_made(Transport())
        assert len(strangers) == 1
        member.connection_lost(None)
        assert member._end.cancelled()
        assert len(strangers) == 0

    asyncio.run(connect())


def heard_of(data: bytes, *, cut: int) -> tuple[list[Any], bool]:
    """Returns what an aggregator heard of a connection, and whether it ended it."""

    async def connect() -> tuple[list[Any], bool]:
        listener, transport = Heard(), Transport()
        member = Member("token of the run", listener, Strangers(1))
        member.connection_made(transport)
        for part in (data[:cut], data[cut:]):
            if not transport.is_ended:
                member.data_received(part)
        member.connection_lost(None)
        return listener.said, transport.is_ended

    return asyncio.run(connect())


@given(st.integers(0, 90))
def test_a_member_introduces_itself_with_the_token(cut: int) -> None:
    first = introduction("token of the run", {7: "here"}, name="process 1")
    said, is_ended = heard_of(first + pack({7: {"is_gone": True}}), cut=cut)
    joined = ("joined", {7: "here"}, "process 1")
    assert said == [joined, ("heard", {"7": {"is_gone": True}}), "lost"]
    assert not is_ended


@given(token=JSON.filter(lambda message: message != "token of the run"), cut=st.integers(0, 90))
def test_without_the_token_nothing_is_heard(token: Any, cut: int) -> None:
    said, is_ended = heard_of(introduction(token, {7: "here"}, name=""), cut=cut)
    assert said == []
    assert is_ended


def test_before_the_token_a_peer_cannot_make_an_aggregator_keep_much() -> None:
    length = MOST_TOKEN_BYTES + 1
    assert heard_of(struct.pack(">I", length), cut=2) == ([], True)
    assert heard_of(pack("x" * 10), cut=2) == ([], True)


def test_messages_are_compact() -> None:
    """A beat of a node of 8 ranks in which all positions changed takes about 60 bytes a rank."""
    at = [1000, "computing", False, 40_000, ["backward", 3, 15]]
    beat = pack({rank: {"at": at} for rank in range(8)})
    assert len(beat) <= 8 * 70
    assert json.loads(beat[4:])["7"]["at"] == at


def test_what_arrives_with_the_welcome_is_not_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Line(server.getsockname(), timeout_s=60)
        peer, _ = server.accept()
        with peer:
            peer.sendall(pack("before") + pack(WELCOME) + pack("after"))
            line.await_welcome(60)
            assert line.receive(60) == ["after"]
        line.close()
