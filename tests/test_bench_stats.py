"""The statistics of a comparison, by known values and by simulated noise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from xnnfast.bench import stats

# ---- one sample


def test_percentiles_are_values_of_the_sample():
    values = list(range(1, 1001))
    assert [stats.percentile(values, share) for share in (50, 90, 99, 99.9, 100)] == [500, 900, 990, 999, 1000]
    assert stats.percentile([7.0], 99.9) == 7


def test_summary_keeps_median_and_spread_apart_from_outliers():
    summary = stats.summarize([1, 2, 3, 4, 1000])
    assert summary["median"] == 3
    assert summary["mad"] == 1
    assert summary["count"] == 5


def test_a_slow_start_is_shown_as_drift_and_leaves_the_median_alone():
    # Row P1 of the case list: the first runs take three times as long.
    samples = [3.0, 3.0] + [1.0] * 8
    assert stats.drift(samples) == pytest.approx(2.0)
    assert stats.summarize(samples)["median"] == 1.0


# ---- Mann-Whitney


def by_enumeration(a, b):
    """Two-sided probability by going over every way to divide the values."""
    both = [*a, *b]
    middle = len(a) * len(b) / 2

    def u(chosen):
        rest = [both[i] for i in range(len(both)) if i not in chosen]
        return sum(both[i] > x for i in chosen for x in rest)

    found = abs(u(range(len(a), len(both))) - middle)
    every = [abs(u(chosen) - middle) for chosen in itertools.combinations(range(len(both)), len(b))]
    return sum(each >= found - 1e-9 for each in every) / len(every)


@pytest.mark.parametrize("seed", range(6))
def test_exact_probability_equals_enumeration(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=5).tolist(), (rng.normal(size=4) + 0.4 * seed).tolist()
    assert stats.mann_whitney(a, b)[1] == pytest.approx(by_enumeration(a, b))


def test_smallest_probability_of_seven_against_seven_is_below_the_rate():
    assert stats.mann_whitney(range(7), range(10, 17))[1] == pytest.approx(2 / math.comb(14, 7))
    assert 2 / math.comb(14, 7) < stats.ALPHA < 2 / math.comb(10, 5)


def test_normal_approximation_is_near_the_exact_probability():
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=25), rng.normal(size=25) + 0.6
    exact = stats.mann_whitney(a, b)[1]
    # One more value on each side leaves the exact branch; its influence is small.
    approximate = stats.mann_whitney([*a, np.median(a)], [*b, np.median(b)])[1]
    assert approximate == pytest.approx(exact, rel=0.35)


def test_equal_values_say_nothing():
    assert stats.mann_whitney([1, 1, 1], [1, 1, 1])[1] == 1.0


def test_holm_multiplies_the_smallest_most_and_keeps_the_order():
    assert stats.holm({"a": 0.01, "b": 0.001, "c": 0.5}) == pytest.approx({"b": 0.003, "a": 0.02, "c": 0.5})
    assert stats.holm({"a": 0.4, "b": 0.4})["b"] == pytest.approx(0.8)


# ---- ratio


def test_ratio_of_rounds_cancels_what_drifts():
    drift = np.exp(np.linspace(0, 1, 30))
    ratio = stats.paired_ratio(drift, 1.1 * drift)
    assert ratio.value == pytest.approx(1.1)
    assert ratio.low == pytest.approx(1.1) and ratio.high == pytest.approx(1.1)


@pytest.mark.parametrize("ratio", [stats.paired_ratio, stats.unpaired_ratio])
@pytest.mark.parametrize("bad", [[], [0.0], [-1.0], [math.nan], [math.inf]])
def test_ratios_of_what_is_no_amount_are_refused(ratio, bad):
    for sides in ((bad, [1.0]), ([1.0], bad)):
        with pytest.raises(ValueError, match="need numbers above 0"):
            ratio(*sides)


@pytest.mark.parametrize("ratio", [stats.paired_ratio, stats.unpaired_ratio])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_equal_values_have_a_ratio_without_noise(ratio, count):
    found = ratio([2.0] * count, [3.0] * count)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5)) and found.noise < 1e-12


def test_one_outlier_does_not_move_the_ratio():
    rng = np.random.default_rng(0)
    a, b = np.exp(rng.normal(0, 0.01, (2, 15)))
    before = stats.paired_ratio(a, b).value
    b[3] *= 50
    assert stats.paired_ratio(a, b).value == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize("ratio", [stats.paired_ratio, stats.unpaired_ratio])
def test_interval_holds_the_truth_and_noise_is_the_spread_of_the_estimate(ratio):
    inside, estimates, noises = 0, [], []
    for seed in range(200):
        rng = np.random.default_rng([seed, 1])
        a, b = np.exp(rng.normal(0, 0.03, (2, 20)))
        found = ratio(a, 1.05 * b)
        inside += found.low <= 1.05 <= found.high
        estimates.append(math.log(found.value))
        noises.append(found.noise)
    assert inside >= 190
    assert np.median(noises) == pytest.approx(np.std(estimates), rel=0.35)


# ---- the decision

LOOKS = (7, 9, 11, 14, 17, 21, 26, 32, 39, 47, 57)


def decide(a, b):
    """The verdict of a comparison that looks again and again, as compare does; and its rounds."""
    for n in LOOKS:
        evidence = stats.examine({"latency": (a[:n], b[:n])})["latency"]
        if stats.settled(evidence):
            break
    return stats.judge(evidence), n


def independent(spread):
    return lambda rng, n: np.exp(rng.normal(0, spread, (2, n)))


def drifting(rng, n):
    """A machine whose speed wanders by a percent from process to process."""
    times = np.exp(np.cumsum(rng.normal(0, 0.01, 2 * n)) + rng.normal(0, 0.015, 2 * n))
    even = np.arange(n) % 2 == 0
    first, second = times[0::2], times[1::2]
    return np.where(even, first, second), np.where(even, second, first)


def with_tails(rng, n):
    """A seventh of the processes is slower, some much."""
    return np.exp(rng.normal(0, 0.015, (2, n)) + (rng.random((2, n)) < 0.15) * rng.exponential(0.3, (2, n)))


def shared(rng, n):
    """A host whose neighbours come and go between rounds, by 6 %, and are the same to both sides of one."""
    return np.exp(rng.normal(0, 0.06, n) + rng.normal(0, 0.008, (2, n)))


NOISE = {
    "shared": shared,
    "1%": independent(0.01),
    "2%": independent(0.02),
    "6%": independent(0.06),
    "drift": drifting,
    "tails": with_tails,
}


@pytest.mark.parametrize("name", NOISE)
def test_no_difference_is_hardly_ever_called_slower(name):
    verdicts = [decide(*NOISE[name](np.random.default_rng([seed, 7]), LOOKS[-1]))[0] for seed in range(200)]
    assert verdicts.count(stats.SLOWER) <= 1
    assert verdicts.count(stats.FASTER) <= 1


@pytest.mark.parametrize("slowdown, share", [(0.05, 0.8), (0.10, 0.95), (0.20, 1.0)])
@pytest.mark.parametrize("name", ["1%", "2%", "drift", "shared"])
def test_slowdowns_are_found(name, slowdown, share):
    found = 0
    for seed in range(60):
        a, b = NOISE[name](np.random.default_rng([seed, 8]), LOOKS[-1])
        found += decide(a, b * (1 + slowdown))[0] == stats.SLOWER
    assert found >= share * 60


def test_a_speedup_is_a_speedup():
    a, b = independent(0.01)(np.random.default_rng(0), 20)
    assert decide(a, b / 1.1)[0] == stats.FASTER


def test_small_but_certain_differences_are_none():
    a, b = independent(0.002)(np.random.default_rng(0), 57)
    evidence = stats.examine({"latency": (a, 1.01 * b)})["latency"]
    assert evidence.significant and not evidence.beyond
    assert stats.judge(evidence) == stats.SAME


def test_a_difference_that_may_be_small_is_ambiguous():
    a, b = independent(0.03)(np.random.default_rng(1), 57)
    evidence = stats.examine({"latency": (a, 1.04 * b)})["latency"]
    assert evidence.significant and not evidence.beyond
    assert stats.judge(evidence) == stats.AMBIGUOUS


def test_noise_beyond_all_measure_is_not_called_the_same():
    a, b = independent(0.5)(np.random.default_rng(1), 20)
    assert stats.judge(stats.examine({"latency": (a, b)})["latency"]) == stats.AMBIGUOUS


def test_a_slowdown_that_every_round_shows_is_not_called_the_same():
    # The test can't tell sides apart whose rounds differ more than they do; the interval can.
    for seed in range(40):
        a, b = shared(np.random.default_rng([seed, 9]), 10)
        assert stats.judge(stats.examine({"latency": (a, 1.06 * b)})["latency"]) in (stats.SLOWER, stats.AMBIGUOUS)


def test_too_few_rounds_decide_nothing():
    a, b = independent(0.01)(np.random.default_rng(0), stats.MIN_ROUNDS - 1)
    assert stats.judge(stats.examine({"latency": (a, 2 * b)})["latency"]) == stats.INVALID


def test_measured_noise_raises_what_counts():
    assert stats.threshold(0.01) == 0.03
    assert stats.threshold(0.04) == pytest.approx(0.08)


def test_the_worst_verdict_is_the_status():
    assert stats.worst(["SAME", "FASTER"]) == "FASTER" and stats.STATUS["FASTER"] == 0
    assert stats.STATUS[stats.worst(["SAME", "AMBIGUOUS", "INVALID"])] == 4
    assert stats.STATUS[stats.worst(["INVALID", "SLOWER", "AMBIGUOUS"])] == 1
    assert stats.worst([]) == "SAME"
