"""Reuse rates: counts by class and age, and what follows from them."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from cache.retention.rates import EDGES, NUM_BINS, ReuseRates, age_bin, best_rates, hazards
from cache.retention.versions import Journal

WIDTHS = np.diff(EDGES)


@pytest.mark.parametrize(
    ("age", "bin"), [(0, 0), (0.99, 0), (1, 1), (1.99, 1), (2, 2), (4, 3), (1023, 10), (1024, 11), (1e9, 19)]
)
def test_ages_are_told_apart_by_powers_of_two(age: float, bin: int) -> None:
    assert age_bin(age) == bin
    assert EDGES[bin] <= age and (bin == NUM_BINS - 1 or age < EDGES[bin + 1])


def test_a_class_takes_the_shape_of_the_class_around_it() -> None:
    uses, seconds = np.zeros((2, 3, NUM_BINS))
    uses[0, 5:7], seconds[0] = (4000.0, 1000.0), 1e6
    uses[1, 5], seconds[1, 5] = 8000.0, 1e6
    rates = hazards(uses, seconds, np.array([0, 0, 0]), np.array([0, 1, 1]))
    # what is believed at first weighs 16,000 s here
    assert rates[0, 5] == pytest.approx(4e-3, rel=2e-2) and rates[0, 6] == pytest.approx(1e-3, rel=2e-2)
    # twice as many uses as the class around it has, and nothing seen in bin 6: twice its rate there
    assert rates[1, 6] / rates[0, 6] == pytest.approx(rates[1, 5] / rates[0, 5], rel=1e-2)
    assert rates[1, 5] == pytest.approx(8e-3, rel=2e-2)
    # nothing seen at all: as around it
    np.testing.assert_allclose(rates[2], rates[0], rtol=1e-9)


def test_a_steady_rate_is_worth_itself_at_any_age() -> None:
    np.testing.assert_allclose(best_rates(np.full((1, NUM_BINS), 1e-5)), 1e-5, rtol=1e-6)


def test_waiting_for_a_likely_use_is_worth_more_than_the_moment() -> None:
    rates = np.full((1, NUM_BINS), 1e-9)
    rates[0, 5] = 0.1  # between 16 and 32 s
    best = best_rates(rates)[0]
    early = [(1 - np.exp(-0.1 * 16)) / (16 - age + 10 * (1 - np.exp(-0.1 * 16))) for age in (1.5, 3, 6, 12)]
    np.testing.assert_allclose(best[1:5], early, rtol=1e-4)
    assert best[5] == pytest.approx(0.1, rel=1e-6)
    assert best[6] == pytest.approx(1e-9, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_best_rates_are_the_best_over_all_ends(seed: int) -> None:
    rates = 10 ** np.random.default_rng(seed).uniform(-7, -1, (1, NUM_BINS))
    for first, got in enumerate(best_rates(rates)[0]):
        chance, time, alive = 0.0, 0.0, 1.0
        ratios = []
        for b in range(first, NUM_BINS):
            width = WIDTHS[b] / (2 if b == first else 1)
            used = alive * -np.expm1(-rates[0, b] * width)
            time += used / rates[0, b]
            alive -= used
            chance += used
            ratios.append(chance / time)
        assert got == pytest.approx(max(ratios), rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_exposure_is_the_time_that_members_spent_in_each_bin(seed: int) -> None:
    rng, rates = random.Random(seed), ReuseRates(Journal())
    row = rates.row(("prompt_end", 1))
    spent, entered = np.zeros(NUM_BINS), []
    for step in range(200):
        now = 3.0 * step
        if entered and rng.random() < 0.5:
            bin, since = entered.pop(rng.randrange(len(entered)))
            rates.leave(row, bin, now, used=True)
            spent[bin] += now - since
        else:
            bin = rng.randrange(NUM_BINS)
            rates.enter(row, bin, now)
            entered.append((bin, now))
    for bin, since in entered:
        spent[bin] += 600.0 - since
    (counts,) = [each for each in rates.counts(600.0) if each["class"] == ["prompt_end", 1]]
    np.testing.assert_allclose(counts["seconds"], spent)
    assert sum(counts["uses"]) == (200 - len(entered)) / 2


def test_counts_survive_a_restart() -> None:
    rates = ReuseRates(Journal())
    for at, name in enumerate((("branch", 0), ("branch", 1), ("prompt_end", 0))):
        row = rates.row(name)
        for bin in range(at, 8):
            rates.enter(row, bin, 0.0)
            rates.leave(row, bin, 2.0**bin, used=bin % 2 == 0)
    rates.learn(500.0)
    again = ReuseRates(Journal(), json.loads(json.dumps(rates.counts(500.0))))
    for name in rates.known:
        got = [again.rate(again.row(name), bin) for bin in range(NUM_BINS)]
        np.testing.assert_allclose(got, [rates.rate(rates.row(name), bin) for bin in range(NUM_BINS)])
