"""What a process must know of another one's pages to push to them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

VERSION = 1
LIMIT = 1 << 64
"""Addresses, sizes and epochs are below this."""


class Plane(NamedTuple):
    """One registered buffer.

    Attributes:
        name: as in the pool.
        address: of its first byte, in the process that has it.
    """

    name: str
    address: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Descriptor:
    """Where a peer's pages lie while one start of it lives. It holds no secret, and everything needed to write.

    Attributes:
        peer: a name that stays over restarts.
        epoch: of this start of the peer; a later start has a larger one.
        address: `host:port` where its link listens; every start has another port.
        control: address of the bytes that hold the epoch for as long as it is the right one.
        page_nbytes, num_pages: as in the pool.
        planes: the registered buffers, each of `num_pages * page_nbytes` bytes.
    """

    peer: str
    epoch: int
    address: str
    control: int
    page_nbytes: int
    num_pages: int
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for anything that no link can have."""
        host, _, port = self.address.rpartition(":")
        if not self.peer or not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise ValueError(
                f"a descriptor has a peer and a host:port, not {self.peer!r} and {self.address!r}"
            )
        numbers = {name: getattr(self, name) for name in ("epoch", "control", "page_nbytes", "num_pages")}
        numbers |= {f"plane {plane.name!r}": plane.address for plane in self.planes}
        wrong = {name: n for name, n in numbers.items() if type(n) is not int or not 0 < n < LIMIT}
        if wrong:
            raise ValueError(f"a descriptor's numbers are whole and in 1 .. 2**64 - 1, not {wrong}")
        if not self.planes or len({plane.name for plane in self.planes}) < len(self.planes):
            raise ValueError(f"a descriptor has planes of distinct names, not {self.planes}")
        if max(plane.address for plane in self.planes) + self.num_pages * self.page_nbytes > LIMIT:
            raise ValueError("a descriptor's planes reach beyond the end of memory")

    def to_json(self) -> str:
        """As text, to send over any channel."""
        return json.dumps({"version": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Descriptor:
        """The descriptor that `to_json` gave.

        Raises:
            ValueError: not a descriptor, of another version, or one that no link can have.
        """
        names = ", ".join(["version", *(field.name for field in fields(cls))])
        try:
            given: dict[str, Any] = json.loads(text)
            version = given.pop("version")
            if version == VERSION:
                given["planes"] = tuple(Plane(str(name), address) for name, address in given["planes"])
                given["peer"], given["address"] = str(given["peer"]), str(given["address"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a descriptor of pages ({error!r}); it has {names}") from error
        if version != VERSION:
            raise ValueError(
                f"a descriptor of {version=}, this side knows {VERSION}; run one version on both"
            )
        if unknown := given.keys() ^ {field.name for field in fields(cls)}:
            raise ValueError(
                f"not a descriptor of pages (missing or unknown: {sorted(unknown)}); it has {names}"
            )
        return cls(**given)
