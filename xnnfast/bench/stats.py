"""The statistics of a comparison: from one number per process to a verdict.

In come the medians of processes, in rounds of one process of each side; out goes a ratio with an interval, a
probability and one of the words SAME, FASTER, SLOWER, AMBIGUOUS, INVALID.

What counts is one number per process: samples of one process share its memory layout and its moment, so that a
test over samples finds differences between any two processes, even of the same build.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

SAME, FASTER, SLOWER, AMBIGUOUS, INVALID = "SAME", "FASTER", "SLOWER", "AMBIGUOUS", "INVALID"
#: Exit status of ``xnnfast compare``; the worst one of all metrics counts.
STATUS = {SAME: 0, FASTER: 0, SLOWER: 1, AMBIGUOUS: 3, INVALID: 4}
#: From harmless to bad. A slowdown that was found outweighs what could not be told.
_ORDER = (SAME, FASTER, AMBIGUOUS, INVALID, SLOWER)

#: False-alarm rate of the test, over all metrics of a comparison.
ALPHA = 0.002
#: Changes smaller than that are none.
TOLERANCE = 0.03
#: SAME is said only if there is no room for larger ones.
COARSE = 0.10
#: Fewer processes of a side than that prove nothing: with 7 the smallest possible p is 0.0006.
MIN_ROUNDS = 7
#: Share of resampled ratios that the interval holds.
CONFIDENCE = 0.99
RESAMPLES = 2000


def worst(verdicts: Sequence[str]) -> str:
    return max(verdicts, key=_ORDER.index, default=SAME)


# ---------------------------------------------------------------------------------------------------
# Describing one sample


def percentile(values: Any, share: float) -> float:
    """The smallest value that at least this share (0 to 100) of all values does not exceed."""
    ordered = np.sort(np.asarray(values, np.float64))
    if not ordered.size:
        raise ValueError("need at least one value")
    place = math.ceil(share * ordered.size / 100 - 1e-9) - 1
    return float(ordered[min(max(place, 0), ordered.size - 1)])


def summarize(values: Any) -> dict[str, float]:
    """Median, spread and percentiles."""
    array = np.asarray(values, np.float64)
    median = float(np.median(array))
    return {
        "count": int(array.size),
        "min": float(array.min()),
        "mean": float(array.mean()),
        "median": median,
        "mad": float(np.median(np.abs(array - median))),
        **{f"p{share:g}": percentile(array, share) for share in (50, 90, 95, 99, 99.9)},
        "max": float(array.max()),
    }


def drift(values: Any) -> float:
    """How much the median of the first fifth lies above that of the rest, as a share: shown, never judged."""
    array = np.asarray(values, np.float64)
    first = max(1, array.size // 5)
    if array.size < 5:
        return 0.0
    rest = float(np.median(array[first:]))
    return float(np.median(array[:first])) / rest - 1 if rest else 0.0


# ---------------------------------------------------------------------------------------------------
# Mann-Whitney


def ranks(values: Array) -> Array:
    """Ranks from 1, the mean rank for equal values."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    result: Array = (ends - (counts - 1) / 2)[inverse]
    return result


@lru_cache(maxsize=64)
def _u_counts(n: int, m: int) -> tuple[int, ...]:
    """How many of the orders of n and m values give each U: a Gaussian binomial coefficient."""
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        # Times (1 - q^(m+i)), divided by (1 - q^i).
        for place in range(n * m, m + i - 1, -1):
            counts[place] -= counts[place - m - i]
        for place in range(i, n * m + 1):
            counts[place] += counts[place - i]
    return tuple(counts)


def mann_whitney(a: Any, b: Any) -> tuple[float, float]:
    """U of b (pairs in which b is larger) and the two-sided probability of one so far from the middle.

    Exact up to 25 values a side without equal ones, otherwise by the normal approximation with corrections for
    ties and for continuity.
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    n, m = x.size, y.size
    if not n or not m:
        raise ValueError("need at least one value on each side")
    both = np.concatenate([x, y])
    u = float(ranks(both)[n:].sum() - m * (m + 1) / 2)
    _, ties = np.unique(both, return_counts=True)
    if max(n, m) <= 25 and ties.max() == 1:
        counts = _u_counts(n, m)
        tail = round(min(u, n * m - u))
        return u, min(1.0, 2 * sum(counts[: tail + 1]) / math.comb(n + m, n))
    total = n + m
    variance = n * m / 12 * (total + 1 - float((ties**3.0 - ties).sum()) / (total * (total - 1)))
    if variance <= 0:
        return u, 1.0
    distance = max(0.0, abs(u - n * m / 2) - 0.5)
    return u, min(1.0, math.erfc(distance / math.sqrt(2 * variance)))


def holm(probabilities: Mapping[Any, float]) -> dict[Any, float]:
    """Probabilities corrected for their number (Holm): compare each with the false-alarm rate of all together."""
    corrected: dict[Any, float] = {}
    highest = 0.0
    for place, (name, p) in enumerate(sorted(probabilities.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, p * (len(probabilities) - place)))
        corrected[name] = highest
    return corrected


# ---------------------------------------------------------------------------------------------------
# The ratio


def middle(values: Array) -> Array:
    """Mean of the middle three fifths of the last axis: nearly as sharp as a mean, and not moved by outliers."""
    cut = values.shape[-1] // 5
    ordered = np.sort(values, axis=-1)
    result: Array = ordered[..., cut : values.shape[-1] - cut].mean(axis=-1)
    return result


@dataclass(frozen=True)
class Ratio:
    """b over a: the estimate, its interval, and how far a build may differ from itself at this number of rounds."""

    value: float
    low: float
    high: float
    #: Standard deviation of the estimate where there is no difference.
    noise: float


def _logarithms(values: Any) -> Array:
    array = np.asarray(values, np.float64)
    if not array.size or not (np.isfinite(array) & (array > 0)).all():
        raise ValueError("need numbers above 0 on each side, since ratios of others mean nothing")
    return np.log(array)


def paired_ratio(a: Any, b: Any, *, seed: int = 0, resamples: int = RESAMPLES) -> Ratio:
    """The ratio of processes that ran in rounds; what drifts slower than a round cancels."""
    x, y = _logarithms(a), _logarithms(b)
    rng = np.random.default_rng(seed)
    differences = y - x
    n = differences.size
    found = middle(differences[rng.integers(0, n, (resamples, n))])
    # Without a difference between the sides, each round's ratio would be as likely turned round.
    own = differences - middle(differences)
    noise = 0.0
    if n > 1:
        signs = rng.choice([-1.0, 1.0], (resamples, n))
        noise = float(np.std(middle(signs * own))) * math.sqrt(n / (n - 1))
    return _ratio(float(middle(differences)), found, noise)


def unpaired_ratio(a: Any, b: Any, *, seed: int = 0, resamples: int = RESAMPLES) -> Ratio:
    """The ratio of processes that ran at different times."""
    x, y = _logarithms(a), _logarithms(b)
    rng = np.random.default_rng(seed)
    first, second = (middle(side[rng.integers(0, side.size, (resamples, side.size))]) for side in (x, y))
    halves = []
    for side in (x, y):
        half = side.size // 2
        if half:
            mixed = rng.permuted(np.broadcast_to(side, (resamples, side.size)), axis=1)
            halves.append(middle(mixed[:, :half]) - middle(mixed[:, half : 2 * half]))
    noise = float(np.std(np.concatenate(halves))) / math.sqrt(2) if halves else 0.0
    return _ratio(float(middle(y) - middle(x)), second - first, noise)


def _ratio(value: float, found: Array, noise: float) -> Ratio:
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Ratio(math.exp(value), math.exp(low), math.exp(high), noise)


# ---------------------------------------------------------------------------------------------------
# The decision


@dataclass(frozen=True)
class Evidence:
    """What is known of one metric."""

    ratio: Ratio
    #: As the test gives it, and corrected for the number of metrics.
    p: float
    corrected: float
    rounds: int
    #: How far from 1 a ratio has to lie to count.
    threshold: float

    @property
    def significant(self) -> bool:
        return self.corrected < ALPHA

    @property
    def beyond(self) -> bool:
        return self.outside(self.threshold)

    def outside(self, share: float) -> bool:
        """The interval leaves no room for a smaller change."""
        edge = math.log1p(share)
        return math.log(self.ratio.low) > edge or math.log(self.ratio.high) < -edge

    def within(self, share: float) -> bool:
        """The interval leaves no room for a larger change."""
        edge = math.log1p(share)
        return -edge < math.log(self.ratio.low) and math.log(self.ratio.high) < edge


def threshold(noise: float, tolerance: float = TOLERANCE) -> float:
    return max(tolerance, 2 * noise)


def examine(
    sides: Mapping[Any, tuple[Sequence[float], Sequence[float]]], *, paired: bool = True, seed: int = 0
) -> dict[Any, Evidence]:
    """The evidence of every metric from the numbers of its two sides, all larger meaning worse."""
    probabilities = {name: mann_whitney(a, b)[1] for name, (a, b) in sides.items()}
    corrected = holm(probabilities)
    found = {}
    for name, (a, b) in sides.items():
        ratio = (paired_ratio if paired else unpaired_ratio)(a, b, seed=seed)
        rounds = min(len(a), len(b))
        found[name] = Evidence(ratio, probabilities[name], corrected[name], rounds, threshold(ratio.noise))
    return found


def judge(evidence: Evidence) -> str:
    """The verdict if nothing more can be measured.

    SLOWER and FASTER need the test and the interval to agree. SAME needs the interval to lie within the tolerance,
    or to reach into it while both say nothing and leave no room for a change by 10 %.
    """
    if evidence.rounds < MIN_ROUNDS:
        return INVALID
    if evidence.significant and evidence.beyond:
        return SLOWER if evidence.ratio.value > 1 else FASTER
    if evidence.within(TOLERANCE):
        return SAME
    unclear = evidence.significant or evidence.outside(TOLERANCE) or not evidence.within(COARSE)
    return AMBIGUOUS if unclear else SAME


def settled(evidence: Evidence) -> bool:
    """Whether more rounds would be a waste: a change was found, or there is no room for one."""
    if evidence.rounds < MIN_ROUNDS:
        return False
    return judge(evidence) in (SLOWER, FASTER) or evidence.within(TOLERANCE)
