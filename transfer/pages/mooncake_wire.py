"""Mooncake's TransferEngine as a wire: one-sided writes over TCP or RDMA.

What the library does shapes this file (0.3.13, TCP). Its blocking calls keep a core busy, for 30 s if a peer is
stopped; one for many pieces returns at the first failure or time-out while the other pieces are still written. So every
piece is submitted by itself and asked about until it has ended. A notice exists only with a blocking call: it goes with
a small read, after the peer has just answered, and is delivered when that was answered too.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import numpy as np

from transfer.errors import Closed, Unavailable
from transfer.mooncake.library import load_engine
from transfer.objects import Bytes
from transfer.pages.inbox import News, Notice
from transfer.pages.outcome import Outcome
from transfer.pages.wire import CONTROL_NBYTES, Order, control_bytes

NOTICE = "kda-jax pages 1"
"""The name of our notices and the version of what they say; an engine may carry others."""
PUSHES = 32
"""Pushes in the library at once."""
WINDOW = 8
"""Runs of one push that are submitted at once. After a failure or the deadline nothing more is."""
NOTICE_TRIES, NOTICE_PAUSE_S = 10, 1.0
CLOSING_S = 2.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2e-5, 2e-2
ARRIVED, BROKEN = 1, -1
"""What `transfer_check_status` says of a piece that has ended; anything else is under way."""


class _Push:
    """An order under way, between its caller, who waits until the deadline, and its thread."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._outcome: Outcome | None = None

    @property
    def wanted(self) -> bool:
        """Whether the caller still waits."""
        return self._outcome is None

    def settle(self, outcome: Outcome) -> Outcome:
        """The outcome, which is the first that was given."""
        with self._lock:
            self._outcome = self._outcome or outcome
            self._settled.set()
            return self._outcome

    def wait(self, timeout: float) -> Outcome:
        """The outcome, by the deadline."""
        self._settled.wait(timeout)
        return self.settle(Outcome.LATE)


class MooncakeWire:
    """An engine of its own, one thread a push. It listens on all interfaces; the library knows no other way."""

    def __init__(self, host: str = "127.0.0.1", protocol: str = "tcp", devices: str = "") -> None:
        """Starts the engine.

        Args:
            host: this machine's name or address, as peers reach it.
            protocol: `tcp` or `rdma`.
            devices: RDMA devices, comma-separated; all if empty.

        Raises:
            Unavailable: the library is missing or did not start.
        """
        engine = load_engine(host, protocol)
        self._library: Any = engine
        self._engine: Any = engine.TransferEngine()
        if code := self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices):
            raise Unavailable(f"Mooncake's engine did not start on {host} over {protocol} (code {code})")
        self._address = f"{host}:{self._engine.get_rpc_port()}"
        self._buffers: list[Bytes] = []
        self._slots: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self._room = threading.Semaphore(PUSHES)
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()

    @property
    def address(self) -> str:
        """As in `Wire`."""
        return self._address

    def register(self, buffers: Sequence[Bytes]) -> None:
        """As in `Wire`. Raises Unavailable where the library refuses the memory."""
        for buffer in buffers:
            self._register(self._engine, buffer)

    def send(self, order: Order, timeout: float) -> Outcome:
        """As in `Wire`. Raises Closed after `close`."""
        if not self._room.acquire(blocking=False):
            order.returned()
            return Outcome.BUSY
        push = _Push(order)
        with self._lock:
            if self._engine is None:
                self._room.release()
                order.returned()
                raise Closed("the wire was closed")
            thread = threading.Thread(
                target=self._carry, args=(self._engine, push), name="push pages", daemon=True
            )
            self._threads.add(thread)
            thread.start()
        return push.wait(timeout)

    def notices(self) -> list[Notice]:
        """As in `Wire`."""
        found = []
        for notify in self._engine.get_notifies():
            if notify.name == NOTICE:
                # anybody who reaches the port may have sent it
                with suppress(ValueError):
                    epoch, attempt, news = notify.msg.split()
                    found.append(Notice(int(epoch), int(attempt), News(news)))
        return found

    def now(self) -> float:
        """As in `Wire`."""
        return monotonic()

    def close(self) -> None:
        """As in `Wire`, and waits two seconds for pushes that the library has not ended.

        While one goes on after that, the engine goes on too: what a peer had begun to write then is written to its
        end, and nothing more.
        """
        self._closing.set()
        end = monotonic() + CLOSING_S
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, end - monotonic()))
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            for buffer in self._buffers:
                engine.unregister_memory(buffer.ctypes.data)

    def _carry(self, engine: Any, push: _Push) -> None:
        try:
            try:
                news = self._move(engine, push)
            finally:
                self._room.release()
            if news is not None:
                self._insist(engine, push.order, news)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _move(self, engine: Any, push: _Push) -> News | None:
        """Moves the bytes and gives the caller its outcome; returns what the peer must still be told."""
        order = push.order
        refused = self._ask(engine, order)
        if refused is not None:
            order.returned()
            return None if push.settle(refused) is refused else News.VOID
        news = _write(engine, push)
        order.returned()
        if news is News.WHOLE and push.wanted:
            told = self._tell(engine, order, news) is None
            push.settle(Outcome.DONE if told else Outcome.FAILED)
            return None if told else News.VOID
        push.settle(Outcome.FAILED)
        return News.VOID if news is News.WHOLE else news

    def _insist(self, engine: Any, order: Order, news: News) -> None:
        """Gives the peer a notice, as soon as it answers again."""
        for _ in range(NOTICE_TRIES):
            answer = self._ask(engine, order)
            if answer is None:
                answer = self._tell(engine, order, news)
            if answer is not Outcome.UNREACHABLE or self._closing.wait(NOTICE_PAUSE_S):
                return

    def _ask(self, engine: Any, order: Order) -> Outcome | None:
        """Whether the descriptor's start of the peer answers: None, or why the push is refused."""
        peer, slot = order.descriptor, self._slot(engine)
        batch = engine.batch_transfer_async_read(
            peer.address, [slot.ctypes.data], [peer.control], [slot.nbytes]
        )
        came = _submitted(batch) and _ended(engine, batch)
        known = _known(order, slot)
        self._slots.put(slot)
        return Outcome.UNREACHABLE if not came else None if known else Outcome.STALE

    def _tell(self, engine: Any, order: Order, news: News) -> Outcome | None:
        """Gives the peer a notice; as `_ask`."""
        peer, slot = order.descriptor, self._slot(engine)
        notify = self._library.TransferNotify(NOTICE, f"{peer.epoch} {order.attempt} {news.value}")
        read = (peer.address, slot.ctypes.data, peer.control, slot.nbytes)
        if engine.transfer_sync(*read, self._library.TransferOpcode.Read, notify):
            return Outcome.UNREACHABLE  # the call may have left its read behind: the slot is not used again
        known = _known(order, slot)
        self._slots.put(slot)
        return None if known else Outcome.STALE

    def _register(self, engine: Any, buffer: Bytes) -> None:
        if code := engine.register_memory(buffer.ctypes.data, buffer.nbytes):
            raise Unavailable(f"Mooncake did not register {buffer.nbytes} bytes (code {code})")
        self._buffers.append(buffer)

    def _slot(self, engine: Any) -> Bytes:
        """Registered memory for one answer."""
        with self._lock:
            if self._slots.empty():
                slots = np.zeros((PUSHES, CONTROL_NBYTES), np.uint8)
                self._register(engine, slots.reshape(-1))
                for slot in slots:
                    self._slots.put(slot)
            return self._slots.get()


def _known(order: Order, slot: Bytes) -> bool:
    return bool((slot == control_bytes(order.descriptor.epoch)).all())


def _submitted(batch: int) -> bool:
    """Whether the library took it: it may only be asked about those."""
    return 0 < batch < 1 << 63


def _ended(engine: Any, batch: int) -> bool:
    """Waits until one submitted piece has ended, however long; whether it arrived. It is never asked about again."""
    start = monotonic()
    while (status := engine.transfer_check_status(batch)) not in (ARRIVED, BROKEN):
        sleep(max(SHORTEST_PAUSE_S, min((monotonic() - start) / 16, LONGEST_PAUSE_S)))
    return status == ARRIVED


def _write(engine: Any, push: _Push) -> News:
    """Writes all runs, or as many as the deadline and failures allow; returns when the library has ended with them."""
    order = push.order
    waiting = deque(zip(order.sources, order.targets))
    submitted: deque[int] = deque()
    broken = False
    while submitted or (waiting and push.wanted and not broken):
        while waiting and len(submitted) < WINDOW and push.wanted and not broken:
            source, target = waiting.popleft()
            batch = engine.transfer_submit_write(
                order.descriptor.address, source.ctypes.data, target, source.nbytes
            )
            if _submitted(batch):
                submitted.append(batch)
            else:
                broken = True
        if submitted and not _ended(engine, submitted.popleft()):
            broken = True
    return News.BROKEN if broken else News.VOID if waiting else News.WHOLE
