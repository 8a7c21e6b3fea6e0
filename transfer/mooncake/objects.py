"""Objects in Mooncake Store: never a hang, a crash or an exception for what the store does."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from transfer.calls import check_keys, check_puts, check_reads, deadline
from transfer.counters import Counters, Recorder
from transfer.mooncake.breaker import Breaker
from transfer.mooncake.call import Call
from transfer.mooncake.codes import SICK, outcome
from transfer.mooncake.gets import Gets
from transfer.mooncake.library import Library, connect, disconnect
from transfer.mooncake.memory import Memory
from transfer.mooncake.puts import Puts
from transfer.mooncake.settings import MooncakeSettings
from transfer.mooncake.threads import Threads
from transfer.objects import Bytes, Item, Put, Read

AT_EXIT_S = 120.0  # longer than any call of the library was seen to hang
WORDS = {put.value: put for put in Put}
logger = logging.getLogger(__name__)


class MooncakeObjects:
    """An `Objects` in the one Mooncake Store that a process can have.

    What the store is asked about, reads, or has just taken, it keeps for one lease (the master's flag
    `--default_kv_lease_ttl`): it is neither evicted nor removed meanwhile. `remove` waits for that as far as its
    timeout allows.
    """

    def __init__(self, settings: MooncakeSettings | None = None, library: Library | None = None) -> None:
        """Connects to the store, within seconds.

        Args:
            settings: None for a pure client of a master on this machine.
            library: a store that is set up and is this object's alone; None to set one up.

        Raises:
            Unavailable: see `transfer.mooncake.library.connect`.
        """
        self.settings = settings or MooncakeSettings()
        self._library = connect(self.settings) if library is None else library
        self._ours = library is None
        self._recorder = Recorder()
        self._breaker = Breaker(self.settings.failures, self.settings.pause_s, self._recorder)
        self._threads = Threads(self.settings.threads, "MooncakeObjects")
        memory = Memory(self._library.store, self.settings.recycled_bytes)
        tries, straight = self.settings.tries, self.settings.protocol == "tcp"
        self._puts = Puts(self._library, memory, self._recorder, straight=straight, tries=tries)
        self._gets = Gets(self._library.store, memory, self._recorder, tries=tries)
        atexit.register(self._at_exit)

    def put(self, items: Sequence[Item], timeout: float) -> list[Put]:
        """See `Objects`. Objects that find no room, or whose transfer fails, are tried again some times."""
        check_puts(items)
        items = list(items)
        ended, _ = self._call("put", [item.nbytes for item in items], timeout, self._puts.put, items)
        puts = [WORDS.get(word, Put.FAILED) for word in ended]
        self._recorder.add(dropped=sum(put in (Put.FULL, Put.FAILED) for put in puts))
        return puts

    def get(self, reads: Sequence[Read], timeout: float) -> list[Bytes | None]:
        """See `Objects`. What is read begins at a multiple of 64 bytes."""
        check_reads(reads)
        return self._call("get", None, timeout, self._gets.get, list(reads))[1]

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        """See `Objects`. Each object that is there is kept for one lease."""
        check_keys(keys)
        return [
            word == "hit" for word in self._call("contains", None, timeout, self._contains, list(keys))[0]
        ]

    def remove(self, keys: Sequence[str], timeout: float, force: bool = False) -> list[bool]:
        """See `Objects`. As far as there is time waits until nobody writes an object, and without `force` until nobody
        reads it.
        """
        check_keys(keys)
        work = partial(self._remove, force=force)
        return [word == "removed" for word in self._call("remove", None, timeout, work, list(keys))[0]]

    def counters(self) -> Counters:
        """See `Objects`. Outcomes are those of `Put`, of `transfer.mooncake.codes`, and `hit`, `removed`, `short`,
        `late`, `open` (the breaker was) and `broken` (the library raised; the log has it).
        """
        return self._recorder.snapshot()

    def close(self) -> None:
        """See `Objects`. If a library call hangs for longer than `close_s`, the store is closed when that ends."""
        if not self._threads.close(self.settings.close_s, self._disconnect):
            logger.warning("a call of Mooncake still runs; its store will be closed after it")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self,
        operation: str,
        nbytes: Sequence[int] | None,
        timeout: float,
        work: Callable[[list, Call], None],
        objects: list,
    ) -> tuple[list[str], list[Bytes | None]]:
        """Does the work on a worker thread. How each object has ended by the deadline, and what was read of it.

        `nbytes` is what each object moves, None where that is what was read.
        """
        until = deadline(timeout)
        self._threads.check()
        if not objects:
            return [], []
        call = Call(len(objects), until, self._threads.closing)
        with self._recorder.call(operation) as record:
            if not self._breaker.enter():
                ended = ["open"] * len(objects)
            else:
                ended = ["late"] * len(objects)
                try:
                    self._threads.run(lambda: self._guarded(work, objects, call), until)
                    ended = list(call.ended)
                finally:
                    self._breaker.leave(well=not SICK.intersection(ended))
            values = [value if word == "hit" else None for word, value in zip(ended, call.values)]
            for i, word in enumerate(ended):
                moved = nbytes[i] if nbytes and word == "stored" else 0
                value = values[i]
                record.append((word, moved if value is None else value.nbytes))
        return ended, values

    @staticmethod
    def _guarded(work: Callable[[list, Call], None], objects: list, call: Call) -> None:
        try:
            work(objects, call)
        except Exception:
            logger.exception("Mooncake's library raised")
            call.ended = ["broken" if word == "late" else word for word in call.ended]

    def _contains(self, keys: list[str], call: Call) -> None:
        codes = self._library.store.batch_is_exist(keys)
        call.ended = [outcome(code) if code < 0 else "hit" if code else "absent" for code in codes]

    def _remove(self, keys: list[str], call: Call, force: bool) -> None:
        tries, left = 0, list(range(len(keys)))
        while True:
            codes = self._library.store.batch_remove([keys[i] for i in left], force)
            for i, code in zip(left, codes, strict=True):
                word = outcome(code) if code < 0 else "removed"
                call.ended[i] = "removed" if word == "absent" else word
            left = [i for i in left if call.ended[i] in ("leased", "unfinished")]
            if not left or not call.pause(tries):
                return
            tries += 1
            self._recorder.add(retries=len(left))

    def _at_exit(self) -> None:
        """A process that ends while the library moves bytes would crash."""
        self._threads.close(AT_EXIT_S, self._disconnect)

    def _disconnect(self) -> None:
        atexit.unregister(self._at_exit)
        if self._ours:
            disconnect(self._library)
        else:
            self._library.store.close()
