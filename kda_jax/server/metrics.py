"""Figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily as Counter
from prometheus_client.metrics_core import GaugeMetricFamily as Gauge
from prometheus_client.metrics_core import Metric, SummaryMetricFamily

from kda_jax.server.backend import Backend
from kda_jax.server.live import Live

FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The server's own times, and what the engine counts.

    Attributes:
        first_token: seconds from a request that was read to the first token of each continuation.
        per_token: seconds between the tokens of a continuation.
    """

    def __init__(self, engine: Backend, live: Live) -> None:
        self._registry = CollectorRegistry()
        self.first_token = Histogram(
            "kda_time_to_first_token_seconds",
            "From the request to the first token of a continuation.",
            registry=self._registry,
            buckets=FIRST_TOKEN_S,
        )
        self.per_token = Histogram(
            "kda_time_per_token_seconds",
            "Between the tokens of a continuation.",
            registry=self._registry,
            buckets=PER_TOKEN_S,
        )
        self._registry.register(_OfEngine(engine, live))  # pyright: ignore[reportArgumentType]

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, in the format that a scraper accepts."""
        encoder, kind = choose_encoder(accept)
        return encoder(self._registry), kind


class _OfEngine:
    """Asks the engine when a scraper asks."""

    def __init__(self, engine: Backend, live: Live) -> None:
        self._engine, self._live = engine, live

    def describe(self) -> Iterable[Metric]:
        """Nothing: the engine is not asked before a scraper asks."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The engine at this moment."""
        now = self._engine.statistics()
        yield Gauge("kda_http_requests", "Requests that the server is answering.", len(self._live))
        states = {"waiting": now.waiting, "loading": now.loading, "running": now.running}
        yield _gauges("kda_requests", "Requests in the engine.", "state", states)
        yield Gauge("kda_waiting_tokens", "Prompt tokens that wait.", now.waiting_tokens)
        yield Gauge("kda_slots", "Most requests that run at once.", now.slots)
        pages = {"all": now.pages, "free": now.pages_free, "cached": now.pages_cached}
        yield _gauges(
            "kda_pages", "Pages of device memory; some are cached and used by requests.", "state", pages
        )
        tiers = {tier: (full.checkpoints, full.nbytes, full.budget) for tier, full in now.tiers.items()}
        for number, (name, text) in enumerate(_TIERS):
            yield _gauges(
                f"kda_tier_{name}", text, "tier", {tier: row[number] for tier, row in tiers.items()}
            )
        yield Gauge("kda_remembered_boundaries", "Boundaries known, with bytes and without.", now.remembered)
        prompts = {"computed": now.computed_tokens, **now.restored_tokens}
        yield _counters(
            "kda_prompt_tokens", "Prompt tokens by where their states came from.", "source", prompts
        )
        yield Counter("kda_generated_tokens", "Tokens generated.", now.generated_tokens)
        yield Counter("kda_drafted_tokens", "Tokens guessed ahead.", now.drafted_tokens)
        yield Counter("kda_accepted_tokens", "Tokens guessed ahead that were right.", now.accepted_tokens)
        yield _counters("kda_requests_ended", "Requests that ended.", "outcome", now.ended)
        yield Counter("kda_checkpoints_evicted", "Checkpoints given up for others.", now.evicted)
        yield Counter("kda_checkpoints_lost", "Checkpoints that could not be read.", now.lost)
        yield _counters(
            "kda_checkpoints_written", "Checkpoints written to slower tiers.", "tier", now.written
        )
        yield _counters(
            "kda_checkpoints_unwritten",
            "Checkpoints not written, for want of room or time.",
            "tier",
            now.unwritten,
        )
        yield Counter("kda_device_memory_lost", "How often the device's memory was lost.", now.memory_lost)
        yield SummaryMetricFamily("kda_step_seconds", "Steps of the engine.", now.step.count, now.step.total)
        yield from _stores(now.stores)


_TIERS = (
    ("checkpoints", "Checkpoints that a tier holds."),
    ("bytes", "Bytes that a tier holds."),
    ("budget_bytes", "Bytes that a tier may hold."),
)


def _gauges(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = Gauge(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = Counter(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _stores(stores: Mapping[str, Mapping[str, int | str]]) -> Iterable[Metric]:
    """Counts of `operation outcome` as counters; words, as a breaker's state, as labels."""
    calls = Counter(
        "kda_store_objects", "Objects in calls of stores.", labels=["tier", "operation", "outcome"]
    )
    states = Gauge("kda_store_state", "What a store says of itself.", labels=["tier", "what", "state"])
    for tier, found in stores.items():
        for what, value in found.items():
            operation, _, outcome = what.rpartition(" ")
            if isinstance(value, str):
                states.add_metric([tier, what, value], 1)
            else:
                calls.add_metric([tier, operation, outcome], value)
    return calls, states
