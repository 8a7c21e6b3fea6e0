"""Mooncake's TransferEngine as a wire: one-sided writes over TCP or RDMA.

What the library does shapes this file (0.3.13, TCP): a blocking batch that fails or times out returns while its other
writes go on, so every run is submitted by itself and asked about until it has ended; a stopped peer blocks a read for
30 s; a notice that goes with a read is delivered when the read was answered.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from time import monotonic, sleep
from typing import Any

import numpy as np

from transfer.errors import Closed, Unavailable
from transfer.objects import Bytes
from transfer.pages.inbox import News, Notice
from transfer.pages.outcome import Outcome
from transfer.pages.wire import CONTROL_NBYTES, Order, control_bytes

PACKAGE = "mooncake-transfer-engine-non-cuda>=0.3.13.post1"
NOTICE = "kda-jax pages 1"
"""The name of our notices and the version of what they say; an engine may carry others."""
PUSHES = 64
"""Pushes in the library at once."""
WINDOW = 8
"""Runs of one push that are submitted at once. After a failure or the deadline nothing more is."""
NOTICE_TRIES, NOTICE_PAUSE_S = 10, 1.0
CLOSING_S = 2.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2e-5, 1e-3
ENDED, BROKEN = 1, -1
"""What `transfer_check_status` says of a run that has ended; anything else is under way."""


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
        try:
            from mooncake import engine
        except ImportError as error:
            raise Unavailable(f"pages need Mooncake ({error}); pip install '{PACKAGE}'") from error
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
                epoch, attempt, news = notify.msg.split()
                found.append(Notice(int(epoch), int(attempt), News(news)))
        return found

    def now(self) -> float:
        """As in `Wire`."""
        return monotonic()

    def close(self) -> None:
        """As in `Wire`. Waits two seconds for pushes that the library has not ended; the engine stops with the last."""
        self._closing.set()
        end = monotonic() + CLOSING_S
        for thread in list(self._threads):
            thread.join(max(0.0, end - monotonic()))
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            for buffer in self._buffers:
                engine.unregister_memory(buffer.ctypes.data)

    def _carry(self, engine: Any, push: _Push) -> None:
        try:
            news = self._move(engine, push)
            for _ in range(NOTICE_TRIES if news else 0):
                if self._ask(engine, push.order, news) is not Outcome.UNREACHABLE:
                    break
                if self._closing.wait(NOTICE_PAUSE_S):
                    break
        finally:
            self._room.release()
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _move(self, engine: Any, push: _Push) -> News | None:
        """Moves the bytes and gives the caller its outcome; returns what the peer must still be told."""
        order = push.order
        refused = self._ask(engine, order, None)
        if refused is not None:
            order.returned()
            return None if push.settle(refused) is refused else News.VOID
        news = _write(engine, push)
        order.returned()
        if news is News.WHOLE and push.wanted:
            told = self._ask(engine, order, news) is None
            push.settle(Outcome.DONE if told else Outcome.FAILED)
            return None if told else News.VOID
        push.settle(Outcome.FAILED)
        return News.VOID if news is News.WHOLE else news

    def _ask(self, engine: Any, order: Order, news: News | None) -> Outcome | None:
        """Reads the peer's control bytes, and with them gives a notice; why that failed, if it did."""
        peer = order.descriptor
        slot = self._slot(engine)
        read: list[Any] = [peer.address, slot.ctypes.data, peer.control, slot.nbytes]
        if news is None:
            code = engine.transfer_sync_read(*read)
        else:
            notify = self._library.TransferNotify(NOTICE, f"{peer.epoch} {order.attempt} {news.value}")
            code = engine.transfer_sync(*read, self._library.TransferOpcode.Read, notify)
        if code:
            return (
                Outcome.UNREACHABLE
            )  # the slot is not used again: the library may have left the read behind
        known = bool((slot == control_bytes(peer.epoch)).all())
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


def _write(engine: Any, push: _Push) -> News:
    """Writes all runs, or as many as the deadline and failures allow; returns when the library has ended with them."""
    order = push.order
    waiting = deque(zip(order.sources, order.targets))
    submitted: deque[int] = deque()
    broken = False
    pause = SHORTEST_PAUSE_S
    while submitted or (waiting and push.wanted and not broken):
        while waiting and len(submitted) < WINDOW and push.wanted and not broken:
            source, target = waiting.popleft()
            batch = engine.transfer_submit_write(
                order.descriptor.address, source.ctypes.data, target, source.nbytes
            )
            if 0 < batch < 1 << 63:
                submitted.append(batch)
            else:
                broken = True
        if not submitted:
            break
        # asked about until it has ended, and never again: the library frees it then
        status = engine.transfer_check_status(submitted[0])
        if status in (ENDED, BROKEN):
            submitted.popleft()
            broken = broken or status == BROKEN
            pause = SHORTEST_PAUSE_S
        else:
            sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
    return News.BROKEN if broken else News.VOID if waiting else News.WHOLE
