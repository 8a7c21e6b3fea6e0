"""The tiers behind the device: what is searched, loaded and written there beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

from cache.holder import Holder
from cache.plan import Limits
from cache.tier import Tier
from cache.tiers import page_name, state_name
from cache.tokens import Tokens
from cache.view import View
from kda_jax.engine.explain import name
from kda_jax.engine.loading import Loading, Read
from kda_jax.engine.portable import Portable
from kda_jax.engine.programs import Programs
from kda_jax.engine.rates import Rates
from kda_jax.engine.request import Request
from kda_jax.engine.searching import search
from kda_jax.engine.work import Load
from kda_jax.engine.writing import Writing
from transfer import Objects

THREADS = 4
LEAST, MOST = 0.05, 1.0
"""Seconds that a request waits for a search, at least and at most; between these, what computing its prompt takes."""
LOAD_LEAST, LOAD_MOST = 1.0, 30.0
"""The same for a load."""

Post = Callable[[Callable[[], None]], None]


class Slower:
    """Host memory and stores of objects. Called on the engine's thread; what comes of it is posted there."""

    def __init__(
        self,
        holder: Holder,
        programs: Programs,
        stores: Mapping[Tier, Objects],
        rates: Rates,
        post: Post,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            holder: of the cache's store.
            programs: that move pages.
            stores: of objects, by tier; whoever opened them closes them, after `close`.
            rates: what it measures, and decides by.
            post: has a call done on the engine's thread.
            clock: seconds.
        """
        self.rates, self._holder, self._stores, self._post = rates, holder, stores, post
        self._rows, self._clock = programs.layout.page_rows, clock
        self._loading = Loading(Portable(programs.layout), stores, programs.moved_pages)
        self.writing = Writing(holder, programs, stores, post, clock)
        self._searches = ThreadPoolExecutor(THREADS, "kda-jax search")

    def patience(self, request: Request) -> float:
        """Seconds to wait for a search of a request's prompt; 0 where it is not worth one."""
        if not self._stores:
            return 0.0
        tokens, store = request.tokens, self._holder.store
        here = store.plan(store.match(request.namespace, tokens), len(tokens), Limits()).boundary
        if not self.rates.worth_searching(len(tokens) - 1 - here):
            return 0.0
        known = self.rates.compute(len(tokens) - here)
        return min(MOST, max(LEAST, known)) if known else MOST

    def search(self, request: Request, patience: float, found: Callable[[View | None], None]) -> None:
        """Searches the stores for a prompt; posts `found`, if a thread was free in time."""
        until = monotonic() + patience

        def searched() -> None:
            start, view = monotonic(), None
            if start >= until:  # nobody waits for it any more, and those behind it do
                return
            try:
                view = self.ask(request.namespace, request.tokens, until - start)
            finally:
                took = monotonic() - start
                self._post(lambda: self._found(found, view, took))

        self._searches.submit(searched)

    def ask(self, namespace: bytes, tokens: Tokens, patience: float) -> View | None:
        """What the stores hold of a prompt, on any thread; whatever they do, it is a miss and nothing else."""
        try:
            return search(self._stores, namespace, tokens, self._rows, patience, self._told)
        except Exception:
            return None

    def load(self, load: Load, namespace: bytes, loaded: Callable[[Load, Read], None]) -> None:
        """Reads a checkpoint; posts `loaded`."""
        patience = min(LOAD_MOST, max(LOAD_LEAST, self.rates.compute(load.boundary)))
        self._loading.begin(
            load, namespace, patience, lambda load, read: self._post(lambda: self._loaded(load, read, loaded))
        )

    def stores(self) -> dict[str, dict[str, int | str]]:
        """What the stores of objects have done: `operation outcome`: objects; and the breaker's state."""
        numbers: dict[str, dict[str, int | str]] = {}
        for tier, objects in self._stores.items():
            counters = objects.counters()
            mine: dict[str, int | str] = {
                " ".join(each): ended.objects for each, ended in sorted(counters.operations.items())
            }
            numbers[name(tier)] = {
                **mine, "retries": counters.retries, "dropped": counters.dropped, "breaker": counters.breaker,
            }  # fmt: skip
        return numbers

    def close(self) -> None:
        """Waits for calls that run, and gives up those that wait; on any thread, after the engine's has ended."""
        self._searches.shutdown(cancel_futures=True)
        self._loading.close()
        self.writing.close()

    def _told(self, tier: Tier, there: tuple[str, ...], gone: tuple[str, ...]) -> None:
        self._post(lambda: self.writing.found(tier, there, gone))

    def _found(self, found: Callable[[View | None], None], view: View | None, took: float) -> None:
        self.rates.search.add(1.0, took)
        found(view)

    def _loaded(self, load: Load, read: Read, loaded: Callable[[Load, Read], None]) -> None:
        for tier, (nbytes, took) in read.seconds.items():
            self.rates.loads[tier].add(float(nbytes), took)
        for tier, page in read.lost:
            self.writing.found(tier, (), [state_name(load.key) if page is None else page_name(page)])
        loaded(load, read)
