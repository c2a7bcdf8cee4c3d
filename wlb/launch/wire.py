"""Messages of the watch on TCP: frames of a length and compact JSON, and both kinds of their ends.

`Line` is a rank's blocking end, `Member` an aggregator's end of whoever reports to it. A connection
begins with the run's token. One that has not shown it is a stranger: it is closed when it says
anything else, after 30 s, or when too many come (`Strangers`), and cannot make its peer keep more
than `MOST_TOKEN_BYTES`.
"""

import asyncio
import contextlib
import hmac
import json
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

MOST_BYTES = 1 << 22
"""Longest message: the lines of a failure and a stack, four bytes per character."""
MOST_TOKEN_BYTES = 256
_LENGTH = struct.Struct(">I")
_RECEIVED_BYTES = 1 << 16
_TOKEN_WAIT_S = 30.0
_SPARE = 16
"""Connections beyond those of the job that a listening socket may have."""
_ACCEPT_PAUSE_S = 0.1

OK, WELCOME, STACK, END = "ok", "welcome", "stack", "end"
"""Messages of an aggregator: message received; the root knows this member; send your stack; end."""


class FrameError(ConnectionError):
    """Bytes that are no frame of the watch, or a peer that does not know the token."""


def pack(message: Any) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Takes bytes as they come and gives the messages that are complete.

    most_bytes: length of the longest message that is accepted; may change between messages.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Raises FrameError for a message that is too long or is not JSON."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > self.most_bytes:
                raise FrameError(f"a message of {length} bytes, {self.most_bytes} are allowed")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            try:
                message = json.loads(body)
            except (ValueError, RecursionError):
                raise FrameError("a message that is not JSON") from None
            yield message

    @property
    def num_kept(self) -> int:
        """Bytes of a message that is not complete."""
        return len(self._bytes)


def introduction(token: str, places: Mapping[int, str], *, name: str) -> bytes:
    """The first bytes of a connection. places: the ranks it reports for and where they run. name:
    of an aggregator's process; empty if a rank reports for itself."""
    return pack(token) + pack({"ranks": places, "name": name})


class Line:
    """A rank's connection to an aggregator, used by one thread; `wake` and `shut` are for others.

    Its methods raise OSError when the connection is lost.
    """

    def __init__(self, address: tuple[str, int], *, timeout_s: float) -> None:
        self._socket = socket.create_connection(address, timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._decoder = FrameDecoder()
        # Messages that arrived together with the welcome.
        self._early: list[Any] = []

    def send(self, message: Any) -> None:
        self._socket.sendall(pack(message))

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self, timeout_s: float) -> list[Any]:
        """Messages that arrived, none if `timeout_s` is over or another thread called `wake`."""
        if self._early:
            early, self._early = self._early, []
            return early
        ready = {key.fileobj for key, _ in self._selector.select(max(0.0, timeout_s))}
        if self._woken in ready:
            self._woken.recv(_RECEIVED_BYTES)
        if self._socket not in ready:
            return []
        data = self._socket.recv(_RECEIVED_BYTES)
        if not data:
            raise ConnectionResetError("the connection was closed")
        return list(self._decoder.feed(data))

    def await_welcome(self, timeout_s: float) -> None:
        """Wait until the root knows this rank. OSError with the reason if it never does."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            messages = self.receive(left)
            for i, message in enumerate(messages):
                if message == WELCOME:
                    self._early = messages[i + 1 :]
                    return
                if isinstance(message, dict) and "problem" in message:
                    raise ConnectionRefusedError(message["problem"])
        raise TimeoutError(f"no answer within {timeout_s:g} s")

    def wake(self) -> None:
        """End the wait of `receive`; no effect on a closed line."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def shut(self) -> None:
        """End the connection while another thread uses it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._selector.close()
        for each in (self._socket, self._woken, self._waker):
            each.close()


class Listener(Protocol):
    """An aggregator's reactions to its members."""

    def joined(self, member: "Member") -> None: ...
    def heard(self, member: "Member", updates: dict[str, Any]) -> None: ...
    def lost(self, member: "Member") -> None: ...


class Strangers:
    """The connections to a listening socket that have not shown the token, oldest first.

    A peer of the job shows it with its first bytes, so that the oldest leave where a socket has
    more connections than peers it waits for (num_expected) and a few spare ones.
    """

    def __init__(self, num_expected: int) -> None:
        self.num_expected, self.num_known = num_expected, 0
        self._waiting: dict[Member, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_kept(self) -> int:
        """Bytes kept of them."""
        return sum(member.num_kept for member in self._waiting)

    def came(self, member: "Member") -> None:
        self._waiting[member] = None
        most = max(0, self.num_expected - self.num_known) + _SPARE
        while len(self._waiting) > most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.refuse()

    def known(self, member: "Member") -> None:
        """It has shown the token."""
        self._waiting.pop(member, None)
        self.num_known += 1

    def left(self, member: "Member", *, was_known: bool) -> None:
        self._waiting.pop(member, None)
        self.num_known -= was_known


async def admit(
    listening: socket.socket, token: str, listener: Listener, strangers: Strangers
) -> None:
    """Accept connections to a socket until this is cancelled, one after the other: asyncio's own
    server accepts as many as there are at once, with a traceback for each beyond the open files."""
    loop = asyncio.get_running_loop()
    with listening:
        listening.setblocking(False)
        while True:
            try:
                peer, _ = await loop.sock_accept(listening)
            except OSError:  # The peer left, or no file can be opened until others do.
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            await loop.connect_accepted_socket(lambda: Member(token, listener, strangers), peer)


class Member(asyncio.Protocol):
    """A connection that an aggregator accepted, of a rank or of another aggregator.

    ranks: the ranks it reports for, empty before its introduction. name: see `introduction`.
    heard_s: time of its last message by the monotonic clock.
    """

    def __init__(self, token: str, listener: Listener, strangers: Strangers) -> None:
        self.ranks: dict[int, str] = {}
        self.name = ""
        self.heard_s = 0.0
        self.is_open = False
        self._token, self._listener, self._strangers = token, listener, strangers
        self._is_known = False
        self._decoder = FrameDecoder(MOST_TOKEN_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True
        self._end = asyncio.get_running_loop().call_later(_TOKEN_WAIT_S, self.refuse)
        self._strangers.came(self)

    @property
    def num_kept(self) -> int:
        """Bytes kept of a message that is not complete."""
        return self._decoder.num_kept

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                self._take(message)
        except FrameError:
            self.refuse()

    def refuse(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        # Until it fires, a timer would keep this object.
        self._end.cancel()
        self._strangers.left(self, was_known=self._is_known)
        if self.ranks:
            self._listener.lost(self)

    def send(self, message: Any) -> None:
        """Send, unless the connection is lost."""
        if not self._transport.is_closing():
            self._transport.write(pack(message))

    def close(self) -> None:
        """Close the connection when all that was sent has left."""
        self._transport.close()

    def _take(self, message: Any) -> None:
        if not self._is_known:
            if not hmac.compare_digest(json.dumps(message), json.dumps(self._token)):
                raise FrameError("a token of another run")
            self._is_known, self._decoder.most_bytes = True, MOST_BYTES
            self._end.cancel()
            self._strangers.known(self)
            return
        self.heard_s = time.monotonic()
        if self.ranks:
            self._listener.heard(self, message)
        else:
            self.ranks = {int(rank): place for rank, place in message["ranks"].items()}
            self.name = message["name"]
            self._listener.joined(self)
