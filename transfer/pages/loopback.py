"""A network in memory whose time is virtual and whose faults are given: pages between links of one process, for tests.

It does what was measured of the real library: bytes are acknowledged when they are in place; a write that failed may
leave bytes under way; a peer that is slow makes pushes late, not failed; an address may come back with another epoch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import NamedTuple

from transfer.errors import Closed
from transfer.objects import Bytes
from transfer.pages.inbox import News, Notice
from transfer.pages.outcome import Outcome
from transfer.pages.wire import CONTROL_NBYTES, Order, control_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens to one push; by default nothing but an instant success.

    Attributes:
        wait: seconds before anything, as of a stopped peer.
        slow: seconds that the bytes take, in fragments.
        cut: after this part of the fragments (0 .. 1) the connection breaks; None for never.
        tail: seconds after a break in which the other fragments arrive; None for never.
        kill: the receiver's process ends half way.
        lose: the notice is lost, and the sender does not know.
        repeat: how often the notice comes again, a second apart.
        lag: seconds that the notice takes.
    """

    wait: float = 0.0
    slow: float = 0.0
    cut: float | None = None
    tail: float | None = None
    kill: bool = False
    lose: bool = False
    repeat: int = 0
    lag: float = 0.0


def random_faults(seed: int, chance: float = 0.3, longest: float = 2.0, kill: float = 0.0) -> Iterator[Fault]:
    """Faults without end, the same for the same arguments.

    Args:
        seed: of the draws.
        chance: of each kind of fault in a push.
        longest: seconds, of any wait.
        kill: chance that the receiver ends.
    """
    random = Random(seed)
    while True:
        # every push draws the same number of times, so that a rate does not move what follows
        hit = [random.random() < chance for _ in range(7)]
        seconds = [random.uniform(0, longest) for _ in range(4)]
        part, killed, again = random.random(), random.random() < kill, random.randint(1, 3)
        yield Fault(
            wait=seconds[0] if hit[0] else 0.0,
            slow=seconds[1] if hit[1] else 0.0,
            cut=part if hit[2] else None,
            tail=seconds[2] if hit[3] else None,
            kill=killed,
            lose=hit[4],
            repeat=again if hit[5] else 0,
            lag=seconds[3] if hit[6] else 0.0,
        )


class Network:
    """Addresses, and what is under way between them."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        """At time 0. `faults` are for the pushes in the order they are made, then there are none."""
        self.now = 0.0
        self._faults = iter(faults)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._wires: dict[str, LoopbackWire] = {}

    def advance(self, seconds: float) -> None:
        """Lets time pass, and what is due happen."""
        self.run(self.now + seconds, lambda: False)

    def run(self, end: float, enough: Callable[[], bool]) -> None:
        """Lets time pass until `end`, or until `enough` says so after an event."""
        while not enough():
            if not self._events or self._events[0][0] > end:
                self.now = end
                return
            self.now, _, event = heapq.heappop(self._events)
            event()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Has `event` called then. Of two at the same time the one that was asked for first is first."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def join(self, address: str, wire: LoopbackWire) -> None:
        """Gives an address to a wire. Raises ValueError if another one has it."""
        if address in self._wires:
            raise ValueError(f"{address} is taken; kill what has it first")
        self._wires[address] = wire

    def kill(self, address: str) -> None:
        """Ends the process at an address: its memory is gone, and its pushes go no further."""
        if address in self._wires:
            self._wires.pop(address).alive = False

    def at(self, address: str) -> LoopbackWire | None:
        """Who has the address now."""
        return self._wires.get(address)

    def next_fault(self) -> Fault:
        """The next push's."""
        return next(self._faults, Fault())


class _Fragment(NamedTuple):
    source: Bytes
    target: int


class LoopbackWire:
    """A process's end of a `Network`.

    Attributes:
        buffers: registered.
        heard: notices that came in.
        alive: until `close` or `Network.kill`.
    """

    def __init__(self, network: Network, address: str) -> None:
        """Joins under an address `host:port`, which may have been another's before."""
        self.buffers: list[Bytes] = []
        self.heard: list[Notice] = []
        self.alive = True
        self._network, self._address = network, address
        network.join(address, self)

    @property
    def address(self) -> str:
        """As in `Wire`."""
        return self._address

    def register(self, buffers: Sequence[Bytes]) -> None:
        """As in `Wire`."""
        self.buffers += buffers

    def memory(self, start: int, nbytes: int) -> Bytes | None:
        """Registered bytes; None if they are not, or this process has ended."""
        for buffer in self.buffers if self.alive else ():
            offset = start - buffer.ctypes.data
            if 0 <= offset and offset + nbytes <= buffer.nbytes:
                return buffer[offset : offset + nbytes]
        return None

    def send(self, order: Order, timeout: float) -> Outcome:
        """As in `Wire`; the deadline is in the network's time, which this call lets pass."""
        if not self.alive:
            order.returned()
            raise Closed(f"the wire at {self._address} was closed")
        push = _Push(self._network, self, order, self._network.next_fault())
        self._network.run(self._network.now + timeout, lambda: push.outcome is not None)
        return push.settle(Outcome.LATE)

    def notices(self) -> list[Notice]:
        """As in `Wire`."""
        heard, self.heard = self.heard, []
        return heard

    def now(self) -> float:
        """As in `Wire`."""
        return self._network.now

    def close(self) -> None:
        """As in `Wire`. What this side was writing goes no further."""
        if self.alive:
            self._network.kill(self._address)


class _Push:
    """An order under way, as events of the network."""

    def __init__(self, network: Network, sender: LoopbackWire, order: Order, fault: Fault) -> None:
        self.outcome: Outcome | None = None
        self._network, self._sender, self._order, self._fault = network, sender, order, fault
        self._receiver: LoopbackWire | None = None
        self._broken = False
        network.after(fault.wait, self._check)

    def settle(self, outcome: Outcome) -> Outcome:
        """The outcome, which is the first that was given."""
        self.outcome = self.outcome or outcome
        return self.outcome

    def _check(self) -> None:
        peer, fault = self._order.descriptor, self._fault
        self._receiver = self._network.at(peer.address)
        control = self._receiver and self._receiver.memory(peer.control, CONTROL_NBYTES)
        if control is None:
            self._refuse(Outcome.UNREACHABLE)
        elif (control != control_bytes(peer.epoch)).any():
            self._refuse(Outcome.STALE)
        elif self.outcome is not None:
            self._end(News.VOID)
        else:
            if fault.kill:
                self._network.after(fault.slow / 2, lambda: self._network.kill(peer.address))
            fragments = list(_halves(self._order))
            sent = len(fragments) if fault.cut is None else int(fault.cut * len(fragments))
            for i, fragment in enumerate(fragments[:sent]):
                self._network.after(fault.slow * i / len(fragments), lambda it=fragment: self._send(it))
            self._network.after(fault.slow * sent / len(fragments), lambda: self._written(fragments[sent:]))

    def _refuse(self, outcome: Outcome) -> None:
        if self.settle(outcome) is outcome:
            self._order.returned()
        else:
            self._end(News.VOID)

    def _send(self, fragment: _Fragment) -> None:
        if self._sender.alive and not self._broken:
            self._put(fragment)

    def _put(self, fragment: _Fragment) -> None:
        # on the connection to who was there at first, whoever has the address now
        memory = self._receiver and self._receiver.memory(fragment.target, fragment.source.nbytes)
        if memory is None:
            self._broken = True
        else:
            memory[:] = fragment.source

    def _written(self, rest: list[_Fragment]) -> None:
        fault = self._fault
        if rest and fault.tail is not None:
            # what the network has got is not read from the sender's memory again
            kept = [_Fragment(fragment.source.copy(), fragment.target) for fragment in rest]
            for i, fragment in enumerate(kept):
                self._network.after(fault.tail * (i + 1) / len(kept), lambda it=fragment: self._put(it))
        self._end(News.BROKEN if rest or self._broken else News.WHOLE)

    def _end(self, news: News) -> None:
        if not self._sender.alive:
            return
        self._order.returned()
        if news is News.WHOLE and self.outcome is not None:
            news = News.VOID
        if news is not News.WHOLE:
            self.settle(Outcome.FAILED)
        for i in range(1 + self._fault.repeat):
            self._network.after(self._fault.lag + i, lambda first=i == 0: self._tell(news, first))

    def _tell(self, news: News, first: bool) -> None:
        peer = self._order.descriptor
        receiver = self._network.at(peer.address)
        lost = self._fault.lose and first
        if receiver is not None and not lost:
            receiver.heard.append(Notice(peer.epoch, self._order.attempt, news))
        if news is News.WHOLE:
            self.settle(Outcome.DONE if receiver is not None else Outcome.FAILED)


def _halves(order: Order) -> Iterator[_Fragment]:
    for source, target in zip(order.sources, order.targets):
        half = source.nbytes // 2
        yield _Fragment(source[:half], target)
        yield _Fragment(source[half:], target + half)
