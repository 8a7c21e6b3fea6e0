"""The engine: many requests at once over one model, resumed from what the cache has."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeAlias

from jax.typing import ArrayLike

from cache import Holder, Namespace, Tier
from cache.retention import Creation, Learned, Policy
from kda_jax.engine.arrangement import Arrangement
from kda_jax.engine.execution import Choice, Execution
from kda_jax.engine.explain import Explanation, TreeNode, explain, tree
from kda_jax.engine.lookup import Drafter, Lookup
from kda_jax.engine.loop import Loop
from kda_jax.engine.owner import Owner
from kda_jax.engine.pages import Pages, Slots
from kda_jax.engine.programs import Programs, Progress
from kda_jax.engine.rates import Rates
from kda_jax.engine.request import Overloaded, Refused, Request
from kda_jax.engine.scheduler import Scheduler
from kda_jax.engine.slower import Slower
from kda_jax.engine.statistics import Statistics
from kda_jax.engine.stream import Finished, Stream
from kda_jax.forward import SplitModel, check_tokens, config_of, split
from kda_jax.model import Model
from kda_jax.sampling import Sampler
from transfer import Objects

TokenIds: TypeAlias = ArrayLike | Sequence[int]
GREEDY = Sampler()
SEARCH = 1.0
"""Seconds that `explain` searches stores of objects."""
CLOSING = 10.0
"""Seconds that `close` waits for checkpoints that are being written."""


class Closed(RuntimeError):
    """The engine takes no more requests."""


class Engine:
    """Serves requests from any thread; one thread of its own owns the device.

    Every request resumes from the deepest checkpoint of its tokens that is worth it, and leaves checkpoints behind:
    where its prompt parts from others, at its prompt's end and at the end of what it generates.
    """

    def __init__(
        self,
        model: Model | SplitModel,
        *,
        namespace: Namespace,
        slots: int = 8,
        nbytes: int = 2**28,
        max_tokens: int | None = None,
        budget: int = 512,
        page_rows: int = 64,
        policy: Policy | None = None,
        creation: Creation | None = None,
        host_nbytes: int = 0,
        disk: Objects | None = None,
        remote: Objects | None = None,
        rates: Rates | None = None,
        lookup: int = 0,
        queued: int = 1_000_000,
        stop_tokens: Sequence[int] = (),
        progress: Progress | None = None,
        programs: Programs | None = None,
    ) -> None:
        """Compiles all programs, and starts.

        Args:
            model: the model, or what `split` made of it.
            namespace: what its states depend on, for the names of checkpoints.
            slots: most requests that run at once; others wait.
            nbytes: of device memory, beside the model's own and a little for copies (`copying_most_nbytes`).
            max_tokens: most tokens of a request, prompt and generated; the model's limit when None.
            budget: tokens that a step computes at most, over all requests.
            page_rows: tokens a page of latents.
            policy: an empty one, what to keep; the default learns it.
            creation: which checkpoints are made; the policy's own choice when None.
            host_nbytes: of checkpoints in host memory.
            disk, remote: stores of objects that checkpoints are written to and read from, faster and slower; open,
                and closed by whoever opened them, after the engine. They keep to their own budgets.
            rates: what computing and loading take, to begin with; measured from there on.
            lookup: most tokens that are guessed behind each, from the request's own (`Lookup`); 0 for none.
            queued: most prompt tokens that wait; beyond, `submit` refuses.
            stop_tokens: where requests end that name none.
            progress: told of each program before it is compiled.
            programs: compiled ones of this model and these sizes, as another engine's `programs`.

        Raises:
            ValueError: sizes that do not fit each other or the model.
        """
        parts = model if isinstance(model, tuple) else split(model)
        self.config = config_of(parts)
        sizes = Arrangement(
            slots=slots,
            nbytes=nbytes,
            max_tokens=max_tokens,
            budget=budget,
            page_rows=page_rows,
            host_nbytes=host_nbytes,
            drafts=lookup,
        )
        layout = sizes.layout(parts)
        given, programs = programs, sizes.programs(parts, layout, programs)
        self.layout, self.programs, self._namespace = layout, programs, namespace
        store = sizes.store(layout, policy or Learned())
        self._holder, self._creation, self._queued = Holder(store), creation, queued
        self._lookup = lookup
        self._stops = frozenset(stop_tokens)
        choices: dict[int, Choice] = {}
        stores = {tier: each for tier, each in ((Tier.DISK, disk), (Tier.REMOTE, remote)) if each is not None}
        rates = rates or Rates()
        rates.state_nbytes, rates.row_nbytes = store.state_nbytes, store.row_nbytes
        del store  # old versions keep pages
        self._owner = Owner(self._turn, self._break)
        pace = rates if stores or host_nbytes else None
        pool = Pages(layout.num_pages, layout.page_nbytes), Slots(layout.num_slots)
        scheduler = Scheduler(self._holder, *pool, sizes.sizes(layout), creation or Creation(), pace)
        if given is None:  # last, as it takes long: what does not fit has been refused
            programs.compile_all(progress)
        self._slower = Slower(self._holder, programs, stores, rates, self._owner.post, time.monotonic)
        self._loop = Loop(scheduler, Execution(programs, choices), choices, self._slower, time.monotonic)
        self._lock, self._ids, self._arriving, self._waiting = threading.Lock(), itertools.count(), 0, 0
        self._closed: str | None = None
        self._idle = threading.Event()
        self._owner.start()

    def submit(
        self,
        tokens: TokenIds,
        *,
        max_new_tokens: int,
        sampler: Sampler = GREEDY,
        seed: int = 0,
        stop_tokens: Sequence[int] | None = None,
        priority: int = 0,
        timeout: float | None = None,
        tenant: str = "",
        logprobs: int = 0,
    ) -> Stream:
        """Takes a request; its tokens come on the stream. Never waits for the device.

        Args:
            tokens: the prompt, token ids [T].
            max_new_tokens: most tokens to generate.
            sampler, seed: how tokens are chosen (`make_sampler`); the same seed gives the same tokens.
            stop_tokens: tokens that end the request, and are not among its tokens; the engine's own when None.
            priority: higher goes first.
            timeout: seconds after which it is given up.
            tenant: requests share checkpoints with those of the same tenant alone.
            logprobs: how many of the likeliest tokens to tell with each token, and its own logarithm of probability; 0
                for neither.

        Raises:
            ValueError: tokens that are none, and numbers out of range.
            Refused: prompt and new tokens are more than the engine is made for.
            Overloaded: too many tokens wait already.
            Closed: the engine is closed, or about to be.
        """
        ids = check_tokens(tokens, self.config, 1)
        if sampler.repetition_penalty is not None:
            raise ValueError(
                "repetition_penalty is not for rows of a batch: leave it at 1, or use `generate`"
            )
        if max_new_tokens < 1 or logprobs < 0 or (timeout is not None and timeout <= 0):
            raise ValueError(
                f"{max_new_tokens=} must be positive, {logprobs=} not negative and {timeout=} positive or None"
            )
        self._check_size(len(ids), max_new_tokens)
        stops = self._stops if stop_tokens is None else frozenset(stop_tokens)
        choice = Choice(sampler, seed, stops, min(logprobs, self.config.vocab_size))
        drafter = Lookup(stop_tokens=stops) if self._lookup else None
        now = time.monotonic()
        with self._lock:
            if self._closed:
                raise Closed(self._closed)
            waiting = self._waiting + self._arriving
            if waiting + len(ids) > self._queued:
                raise Overloaded(f"{waiting} tokens wait, the most is {self._queued}: come again later")
            self._arriving += len(ids)
            request = Request(
                id=next(self._ids),
                namespace=_digest(self._namespace, tenant),
                tokens=ids,
                max_new_tokens=max_new_tokens,
                priority=priority,
                deadline=None if timeout is None else now + timeout,
            )
            stream = Stream(request.id, self._cancel)
            self._owner.post(functools.partial(self._arrive, request, stream, choice, drafter, now))
        return stream

    def generate(self, prompts: Sequence[TokenIds], **options: Any) -> list[Finished]:
        """Submits prompts and waits for all of them; `options` and errors are those of `submit`."""
        streams: list[Stream] = []
        try:
            for tokens in prompts:
                streams.append(self.submit(tokens, **options))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return [stream.result() for stream in streams]

    def explain(self, tokens: TokenIds, *, tenant: str = "") -> Explanation:
        """Where a prompt would resume now, and what keeps it from resuming deeper.

        Without a tenant it looks into other namespaces, too: an operator may know what they hold, a tenant may not.

        Raises:
            ValueError: tokens that are none.
        """
        ids, namespace = check_tokens(tokens, self.config, 1), _digest(self._namespace, tenant)
        remote = self._slower.ask(namespace, ids, SEARCH)

        def explained() -> Explanation:
            self._loop.note_evictions()
            store, now = self._holder.store, time.monotonic()
            return explain(store, namespace, ids, remote, self._loop.evicted, now, others=not tenant)

        return self._owner.ask(explained)

    @property
    def closed(self) -> str | None:
        """Why it takes no more requests; None while it does."""
        return self._closed

    def statistics(self) -> Statistics:
        """The engine in numbers, as of the end of a step."""
        return self._owner.ask(self._loop.statistics)

    def tree(self, most: int = 500, *, tenant: str | None = None) -> list[TreeNode]:
        """The first nodes of the prefix tree, shallow to deep: a tenant's, or with None those of every namespace."""
        namespace = None if tenant is None else _digest(self._namespace, tenant)
        known = self._slower.writing.known
        return self._owner.ask(lambda: tree(self._holder.store, most, time.monotonic(), namespace, known))

    def drain(self, timeout: float) -> bool:
        """Takes no more requests and waits for those there are; what has not ended by then is cancelled, and what was
        computed for it becomes checkpoints.

        Args:
            timeout: seconds to wait.

        Returns:
            Whether all ended by themselves.
        """
        with self._lock:
            self._closed = self._closed or "the engine is about to close"
        self._owner.ask(lambda: None)  # who came before has arrived
        finished = self._idle.wait(timeout)
        self._owner.ask(self._loop.retire_all)
        return finished

    def close(self) -> None:
        """Ends every request as cancelled, waits a while for checkpoints that are being written, and ends the engine. A
        second close does nothing."""
        with self._lock:
            self._closed = "the engine is closed"
        self._owner.post(self._loop.cancel_all)
        until = time.monotonic() + CLOSING
        while self._owner.alive and time.monotonic() < until and self._owner.ask(lambda: self._loop.busy):
            time.sleep(0.01)
        self._owner.stop()
        self._slower.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_size(self, prompt: int, new: int) -> None:
        most = min(self.layout.max_tokens, (self.layout.num_pages - 1) * self.layout.page_rows)
        if prompt + new > most:
            raise Refused(
                f"{prompt} tokens and {new} new ones are more than the {most} that the engine is made for: shorten the "
                "prompt or max_new_tokens"
            )

    def _cancel(self, id: int) -> None:
        self._owner.post(lambda: self._loop.cancel(id))

    # On the engine's thread

    def _turn(self) -> float | None:
        self._loop.scheduler.creation = self._kinds()
        due = self._loop.turn()
        self._waiting = self._loop.waiting_tokens
        if not self._loop.asked:
            self._idle.set()
        return due

    def _arrive(
        self, request: Request, stream: Stream, choice: Choice, drafter: Drafter | None, now: float
    ) -> None:
        self._idle.clear()
        self._loop.submit(request, stream, choice, drafter, now)
        with self._lock:
            self._arriving -= len(request.tokens)
            self._waiting += len(request.tokens)

    def _break(self, error: BaseException) -> None:
        """Nobody waits for an engine that is no more."""
        logging.getLogger(__name__).error("the engine failed", exc_info=error)
        message = f"the engine failed: {type(error).__name__}: {error}"
        with self._lock:
            self._closed = message
        self._owner.do_rest()  # who came before has arrived
        self._loop.end_all(message)
        self._idle.set()

    def _kinds(self) -> Creation:
        """Which checkpoints are made: what the policy says by now, where the caller did not."""
        return self._creation or self._holder.store.shelves[Tier.DEVICE].policy.creation


@functools.lru_cache(maxsize=4096)
def _digest(namespace: Namespace, tenant: str) -> bytes:
    """The namespace of a tenant; that of no tenant is the engine's own."""
    if not tenant:
        return namespace.digest()
    name = tenant.encode()
    salt = len(namespace.salt).to_bytes(8, "little") + namespace.salt + name
    return dataclasses.replace(namespace, salt=salt).digest()
