"""Finds the TCP sockets on which processes listen, from /proc."""

import ipaddress
import os
from pathlib import Path

_LISTENS = "0A"


def descendants(pid: int) -> set[int]:
    """Returns a process and all its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:  # it has ended
                continue
            # The process name in brackets may contain spaces.
            parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> list[tuple[str, int]]:
    """Returns (address, port) of each listening socket of the processes."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    return sorted(
        address
        for name in ("tcp", "tcp6")
        for address, inode in _sockets(Path("/proc/net", name))
        if inode in inodes
    )


def socket_count(pid: int) -> int:
    return len(_socket_inodes(pid))


def _socket_inodes(pid: int) -> list[str]:
    found: list[str] = []
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.append(target[len("socket:[") : -1])
    return found


def _sockets(table: Path) -> list[tuple[tuple[str, int], str]]:
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return [(_address(row[1]), row[9]) for row in rows if row[3] == _LISTENS]


def _address(text: str) -> tuple[str, int]:
    """Parses an address such as "0100007F:1F90", whose words of four bytes are little-endian."""
    host, port = text.split(":")
    data = bytes.fromhex(host)
    words = [data[i : i + 4][::-1] for i in range(0, len(data), 4)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)
