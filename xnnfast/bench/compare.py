"""Two builds, models or records compared: from rounds of fresh processes to a verdict per metric.

In come two sides; out goes a result with the verdicts, their evidence and all samples. A round is a fresh process of
each side, and these take turns by slices of milliseconds, so that what comes and goes on the machine hits both.
Rounds and slices alternate in order (A B, B A, ...), a disturbed round is thrown away and repeated, and before
anything is timed the outputs of both sides are compared: a faster wrong answer is none.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..errors import ArgumentError
from . import record, stats
from .environment import advice, disturbances, environment, unlike_clocks
from .measure import (
    Config,
    Inputs,
    MeasureError,
    Subject,
    Worker,
    ask,
    check_cpus,
    constant_notes,
    declared_batch,
    file_sha256,
    job,
    process_median,
    shapes,
    workplace,
)

Facts = dict[str, Any]
Array = np.ndarray[Any, np.dtype[Any]]
FORMAT = "xnnfast-compare"

#: What is compared, each as one number per process, more being worse.
METRICS: dict[str, tuple[str, Callable[[Facts], float]]] = {
    "latency": ("ns", process_median),
    "load": ("ns", lambda answer: float(answer["load"]["total"])),
    "memory": ("bytes", lambda answer: float(answer["memory"]["process_peak"])),
}
#: Allowed difference of outputs, as a share of the largest number.
TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}
#: A machine that spoils more rounds than that is not fit to decide anything.
MOST_DISTURBED = 0.75
#: Share of the budget after which such a machine is given up.
PATIENCE = 0.5
#: Slices of a process's samples; the second number is for models of which no sample fits into such a slice. Odd, since
#: of A B B A A B the same share then follows the other side, for each of them.
SLICES, SLOW_SLICES = 9, 5


@dataclass
class Pair:
    """A model in two builds, or two models: what the rounds alternate between."""

    label: str
    a: Subject
    b: Subject
    config: Config
    sides: tuple[list[Facts], list[Facts]] = field(default_factory=lambda: ([], []))
    disturbed: list[dict[str, str]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    outputs: str = ""
    notes: list[str] = field(default_factory=list)
    files: list[str | None] = field(default_factory=list)
    #: Which of the pairs it is: two may have one label.
    number: int = 0
    #: The CPU that the last round was on, if it was bound to one and not disturbed there.
    cpu: int | None = None

    @property
    def rounds(self) -> int:
        return len(self.sides[0])

    @property
    def spoilt(self) -> bool:
        return len(self.disturbed) > MOST_DISTURBED * (self.rounds + len(self.disturbed))


@dataclass
class Settings:
    """How much a comparison may cost."""

    #: Seconds for all rounds together.
    budget: float = 60.0
    seconds: float = 0.15
    warm_up: float = 0.3
    most: int = 500
    seed: int = 0
    metrics: tuple[str, ...] = ("latency", "load", "memory")
    tolerance: float | None = None
    cpus: list[int] | None = None
    #: "wall", or "cpu": CPU time of the process, for machines that are never quiet.
    clock: str = "wall"


# ---------------------------------------------------------------------------------------------------
# Likeness


def refusals(a: Subject, b: Subject, config: Config, allow: frozenset[str]) -> list[str]:
    """Why two subjects can't be compared."""
    likeness = {word: record.LIKENESS[word] for word in ("isa", "pin")}
    found = record.differences(likeness, {"build": a.facts["build"]}, {"build": b.facts["build"]}, allow)
    if a.facts["datatypes"] != b.facts["datatypes"] and "precision" not in allow:
        found.append(f"datatypes differ: {' '.join(a.facts['datatypes'])} and {' '.join(b.facts['datatypes'])}")
    types = [[each["dtype"] for each in side.facts["inputs"]] for side in (a, b)]
    sizes = [shapes(side.facts, config.batch) for side in (a, b)]
    if types[0] != types[1]:
        found.append(f"input dtypes differ: {types[0]} and {types[1]}")
    elif sizes[0] != sizes[1]:
        found.append(f"input shapes differ: {sizes[0]} and {sizes[1]}")
    return found


@dataclass
class Distance:
    """How far outputs are apart."""

    #: Why they are not the same; None if they are, as far as whoever asked wants to know.
    reason: str | None = None
    exact: bool = True
    #: Of whole numbers, and of others as a share of the largest.
    steps: int = 0
    share: float = 0.0

    def __str__(self) -> str:
        if self.exact:
            return "the same bit for bit"
        parts = ["one step"] if self.steps else []
        if self.share or not self.steps:
            parts.append(f"{self.share:.1g} of the largest number")
        return f"the same within {' and '.join(parts)}"

    def add(self, which: str, a: Array, b: Array, tolerance: float | None, largest: float | None = None) -> bool:
        """Take two more arrays into account; whether they agree. ``largest``: the largest number, if it is not in
        ``a``."""
        if a.shape != b.shape or a.dtype != b.dtype:
            self.reason = f"{which} is {a.dtype} {a.shape} against {b.dtype} {b.shape}"
            return False
        if a.tobytes() == b.tobytes():
            return True
        self.exact = False
        if a.dtype.kind == "V":
            a, b = ((each.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for each in (a, b))
            allowed = TOLERANCES["bfloat16"]
        else:
            allowed = TOLERANCES.get(str(a.dtype), 0.0)
        if a.dtype.kind in "iu" and tolerance is None:
            # In whole numbers: floats don't tell large ones apart. One step of a quantized number may go either way.
            apart = a != b
            steps = max(abs(one - two) for one, two in zip(a[apart].tolist(), b[apart].tolist()))
            self.steps = max(self.steps, steps)
            if steps > (1 if a.dtype.itemsize == 1 else 0):
                self.reason = f"{which} differs by up to {steps} steps"
            return self.reason is None
        x, y = a.astype(np.float64), b.astype(np.float64)
        rest = np.isfinite(x)
        # Signs of NaN and its other bits mean nothing; those of infinity do.
        if not np.array_equal(rest, np.isfinite(y)) or not np.array_equal(x[~rest], y[~rest], equal_nan=True):
            self.reason = f"{which} has NaN or infinity in other places"
            return False
        gap = float(np.abs(x[rest] - y[rest]).max(initial=0.0))
        share = gap / max(float(np.abs(x[rest]).max(initial=0.0)), largest or 0.0, 1e-30)
        self.share = max(self.share, share)
        if share > (allowed if tolerance is None else tolerance):
            self.reason = f"{which} differs by up to {share:.2g} of its largest number"
        return self.reason is None


def differing_outputs(one: str, other: str, tolerance: float | None) -> tuple[str | None, str]:
    """Why the outputs in two folders are not the same, or None; and how far they are apart."""
    names = [sorted(os.listdir(folder)) for folder in (one, other)]
    if names[0] != names[1]:
        return f"{len(names[0])} outputs against {len(names[1])}", ""
    found = Distance()
    for name in names[0]:
        a, b = (np.load(os.path.join(folder, name), allow_pickle=False) for folder in (one, other))
        if not found.add(f"output {name.partition('.')[0]}", a, b, tolerance):
            return found.reason, ""
    return None, str(found)


def differing_samples(one: Sequence[Facts], other: Sequence[Facts], tolerance: float | None) -> tuple[str | None, str]:
    """The same of outputs in records, which keep a hash of each and some of its numbers."""
    if len(one) != len(other):
        return f"{len(one)} outputs against {len(other)}", ""
    found = Distance()
    for number, (a, b) in enumerate(zip(one, other)):
        which = f"output {number}"
        if (a["dtype"], a["shape"]) != (b["dtype"], b["shape"]):
            return f"{which} is {a['dtype']} {a['shape']} against {b['dtype']} {b['shape']}", ""
        if a["sha256"] == b["sha256"]:
            continue
        found.exact = False
        if not found.add(which, record.sample_of(a), record.sample_of(b), tolerance, a["largest"]):
            return found.reason, ""
    return None, str(found) if found.exact else f"{found}, as far as records tell"


# ---------------------------------------------------------------------------------------------------
# Rounds


def compare(
    pairs: Sequence[Pair],
    *,
    settings: Settings | None = None,
    inputs: Sequence[str | os.PathLike[str]] = (),
    allow: frozenset[str] = frozenset(),
    say: Callable[[str], None] = lambda line: None,
) -> Facts:
    """Rounds of all pairs until every verdict is settled or the budget ends."""
    settings = settings or Settings()
    check_cpus(settings.cpus)
    machine = environment()
    allowed = len(settings.cpus or machine["affinity"]) or machine["cpus"] or 1
    begun = time.monotonic()
    with workplace() as folder:
        for number, pair in enumerate(pairs):
            pair.number = number
            place = os.path.join(folder, str(number))
            _prepare(pair, place, settings, inputs, allow)
        evidence: dict[tuple[int, str], stats.Evidence] = {}
        look = stats.MIN_ROUNDS
        longest, pause = 0.0, 0.05
        while True:
            late = time.monotonic() - begun > PATIENCE * settings.budget
            open_pairs = [
                pair
                for pair in pairs
                if not pair.refusals and not (late and pair.spoilt) and not _settled(pair, evidence, settings)
            ]
            if not open_pairs:
                break
            started = time.monotonic()
            spoilt = 0
            for pair in open_pairs:
                spoilt += not _round(pair, settings, allowed)
            longest = max(longest, time.monotonic() - started)
            done = min(pair.rounds for pair in open_pairs)
            say(
                f"round {done}, {sum(len(pair.disturbed) for pair in pairs)} disturbed ones repeated, "
                f"{time.monotonic() - begun:.0f} of {settings.budget:g} s"
            )
            out_of_time = time.monotonic() - begun + longest > settings.budget
            if done >= look or out_of_time:
                evidence = _examine(pairs, settings)
                look = max(look + 1, math.ceil(done * 1.2))
            if out_of_time:
                break
            # What disturbs may soon be over; until then there is no use in adding to the load.
            pause = min(1.0, 2 * pause) if spoilt == len(open_pairs) else 0.05
            if spoilt == len(open_pairs):
                time.sleep(pause)
        evidence = _examine(pairs, settings)
    results = [_result(pair, evidence, settings) for pair in pairs]
    verdict = stats.worst([metric["verdict"] for result in results for metric in result["metrics"]])
    return {
        "format": FORMAT,
        "version": record.VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": machine,
        "settings": asdict(settings),
        "seconds": time.monotonic() - begun,
        "verdict": verdict,
        "results": results,
        "notes": advice(machine),
    }


def _prepare(pair: Pair, place: str, settings: Settings, inputs: Sequence[Any], allow: frozenset[str]) -> None:
    """Inputs for both sides, and their outputs compared."""
    pair.refusals = refusals(pair.a, pair.b, pair.config, allow)
    if pair.refusals:
        return
    folders = [os.path.join(place, name) for name in ("inputs", "a", "b")]
    for folder in folders:
        os.makedirs(folder)
    data = Inputs(folders[0], pair.a.facts, settings.seed, inputs)
    pair.files, _ = data.at(pair.config.batch)
    pair.notes += [*constant_notes(pair.a.facts), *data.notes]
    try:
        for side, folder in zip((pair.a, pair.b), folders[1:]):
            more = {"seconds": 0.0, "warm_up": 0.0, "least": 1, "most": 1, "outputs": folder}
            ask(side.build, job(side, pair.config, pair.files, **more))
    except MeasureError as error:
        pair.refusals.append(f"{'A' if side is pair.a else 'B'}, {side.model}: {error}")
        return
    reason, pair.outputs = differing_outputs(folders[1], folders[2], settings.tolerance)
    if reason is not None:
        pair.refusals.append(f"outputs differ: {reason}")


class _SideError(MeasureError):
    """One side could not measure."""

    def __init__(self, side: int, reason: MeasureError) -> None:
        super().__init__(str(reason))
        self.side = "AB"[side]


def _round(pair: Pair, settings: Settings, allowed: int) -> bool:
    """One process of each side; whether nothing disturbed them. Both start at once, since imports need not be measured,
    and work in turn."""
    order = (0, 1) if pair.rounds % 2 == 0 else (1, 0)
    workers: dict[int, Worker] = {}
    try:
        for side in order:
            try:
                workers[side] = Worker((pair.a, pair.b)[side].build)
            except MeasureError as error:
                raise _SideError(side, error) from error
        for worker in workers.values():
            worker.wait_until_ready()
        answers = _in_turns(pair, workers, settings)
    except _SideError as error:
        # What crashes now and then is not comparable either.
        pair.refusals.append(f"{error.side} failed in round {pair.rounds + len(pair.disturbed) + 1}: {error}")
        return False
    finally:
        for worker in workers.values():
            worker.stop()
    # Bound to one CPU, processes don't see what happens on others.
    watched = allowed if answers[0]["cpu"] is None else 1
    found: dict[str, str] = {}
    for answer in answers:
        found = found or disturbances(answer, pair.config.cpus, watched, settings.clock)
    unlike = unlike_clocks(*answers)
    if not found and unlike is not None:
        found["clock"] = unlike
    if found:
        pair.disturbed.append(found)
        pair.cpu = None
        return False
    pair.cpu = answers[0]["cpu"]
    for kept, answer in zip(pair.sides, answers):
        kept.append(answer)
    return True


def _in_turns(pair: Pair, workers: Mapping[int, Worker], settings: Settings) -> list[Facts]:
    """The answers of a worker of each side, by the number of the side, in whose order they begin. Both open the model,
    then both warm up, then slices of their samples alternate: what is compared lies milliseconds apart."""

    def turn(side: int, words: str) -> Facts:
        try:
            return workers[side].turn(words, settings.seconds + settings.warm_up)
        except MeasureError as error:
            raise _SideError(side, error) from error

    # One that needs no more shares a CPU with the other, or the two might be on unlike ones: that where the scheduler
    # puts the first of them.
    stay = pair.config.cpus == 1
    cpus = settings.cpus if pair.cpu is None else [pair.cpu]
    for side in workers:
        task = job(
            (pair.a, pair.b)[side],
            pair.config,
            pair.files,
            seconds=settings.seconds,
            warm_up=settings.warm_up,
            most=settings.most,
            cpus=cpus,
            stay=stay,
            clock=settings.clock,
            turns=True,
        )
        opened = turn(side, json.dumps(task))
        if opened["cpu"] is not None:
            cpus = [opened["cpu"]]
    slowest = max(turn(side, "warm up")["sample_ns"] for side in workers)
    slices = SLICES if slowest * SLICES <= 1e9 * settings.seconds else SLOW_SLICES
    # As many on both sides, so that those that find the caches cold have the same share in both.
    samples = max(1, min(settings.most // slices, int(1e9 * settings.seconds / slices / slowest)))
    for number in range(slices):
        for side in workers if number % 2 == 0 else reversed(list(workers)):
            turn(side, f"slice {samples}")
    return [turn(side, "end") for side in (0, 1)]


# ---------------------------------------------------------------------------------------------------
# Verdicts


def _numbers(pair: Pair, metric: str) -> tuple[list[float], list[float]]:
    number = METRICS[metric][1]
    return [number(each) for each in pair.sides[0]], [number(each) for each in pair.sides[1]]


def _examine(pairs: Sequence[Pair], settings: Settings) -> dict[tuple[int, str], stats.Evidence]:
    sides = {
        (pair.number, metric): _numbers(pair, metric)
        for pair in pairs
        if pair.rounds >= 2 and not pair.refusals
        for metric in settings.metrics
    }
    return stats.examine(sides, seed=settings.seed) if sides else {}


def _settled(pair: Pair, evidence: Mapping[tuple[int, str], stats.Evidence], settings: Settings) -> bool:
    found = [evidence[pair.number, metric] for metric in settings.metrics if (pair.number, metric) in evidence]
    if not found:
        return False
    # Nothing can make up for a slowdown.
    return all(map(stats.settled, found)) or any(stats.judge(each) == stats.SLOWER for each in found)


def _result(pair: Pair, evidence: Mapping[tuple[int, str], stats.Evidence], settings: Settings) -> Facts:
    reasons = list(pair.refusals)
    tried = pair.rounds + len(pair.disturbed)
    common = Counter(word for found in pair.disturbed for word in found)
    if not reasons and pair.disturbed and (pair.rounds < stats.MIN_ROUNDS or pair.spoilt):
        example = "; ".join(pair.disturbed[-1].values())
        reasons.append(f"{len(pair.disturbed)} of {tried} rounds were disturbed, the last one: {example}")
    elif not reasons and pair.rounds < stats.MIN_ROUNDS:
        reasons.append(f"the budget was enough for {pair.rounds} rounds, {stats.MIN_ROUNDS} are needed")
    metrics = [
        metric_result(
            metric, METRICS[metric][0], _numbers(pair, metric), evidence.get((pair.number, metric)), bool(reasons)
        )
        for metric in settings.metrics
    ]
    return {
        "label": pair.label,
        "config": asdict(pair.config),
        "a": _side(pair.a),
        "b": _side(pair.b),
        "rounds": pair.rounds,
        "disturbed": len(pair.disturbed),
        "disturbances": dict(common.most_common()),
        "invalid": reasons,
        "outputs": pair.outputs,
        "notes": pair.notes,
        "metrics": metrics,
        "processes": [{"a": a, "b": b} for a, b in zip(*pair.sides)],
    }


def metric_result(
    metric: str,
    unit: str,
    numbers: tuple[Sequence[float], Sequence[float]],
    found: stats.Evidence | None,
    invalid: bool,
) -> Facts:
    """The verdict on a metric and what it rests on."""
    made: Facts = {"metric": metric, "unit": unit, "verdict": stats.INVALID}
    if found is None:
        return made
    made.update(
        a=float(np.median(numbers[0])),
        b=float(np.median(numbers[1])),
        ratio=found.ratio.value,
        interval=[found.ratio.low, found.ratio.high],
        noise=found.ratio.noise,
        threshold=found.threshold,
        p=found.p,
        corrected_p=found.corrected,
        rounds=found.rounds,
    )
    if not invalid:
        made["verdict"] = stats.judge(found)
    return made


def _side(side: Subject) -> Facts:
    return {
        "model": side.model,
        "sha256": file_sha256(side.model),
        "python": side.build.python,
        "build": side.facts["build"],
        "options": side.options,
    }


def pair_of(label: str, a: Subject, b: Subject, *, batch: int | None, threads: int, workers: int) -> Pair:
    declared = declared_batch(a.facts)
    if batch is not None and declared is None:
        raise ArgumentError(f"{a.model}: the batch can't be chosen; leave it out")
    return Pair(label, a, b, Config(batch if batch is not None else declared, threads, workers))


# ---------------------------------------------------------------------------------------------------
# Records


def compare_records(a: Facts, b: Facts, allow: frozenset[str] = frozenset(), tolerance: float | None = None) -> Facts:
    """The verdicts from two records. They were measured at different times, so that a change of the machine in between
    counts as a change of what was measured; only undisturbed processes are used."""
    reasons = record.unlike(a, b, allow)
    sides: dict[tuple[int, str], tuple[list[float], list[float]]] = {}
    rows: list[Facts] = []
    notes = ["records are of different moments: a change of the machine in between counts as one of the model"]
    pairs = record.model_pairs(a, b)
    if not reasons:
        notes += _left_out(a, b, pairs)
    for one, other in pairs if not reasons else []:
        found = {record.key(result): result for result in other["results"]}
        for first in one["results"]:
            second = found.get(record.key(first))
            if second is None:
                continue
            row, quiet = _row(one["name"], first, second, tolerance)
            for metric, (_, number) in METRICS.items():
                values = tuple([number(each) for each in side] for side in quiet)
                if all(values):
                    sides[len(rows), metric] = values  # type: ignore[assignment]
            rows.append(row)
    evidence = stats.examine(sides, paired=False) if sides else {}
    for place, row in enumerate(rows):
        row["metrics"] = [
            metric_result(
                metric,
                unit,
                sides.get((place, metric), ([], [])),
                evidence.get((place, metric)),
                bool(row["invalid"]),
            )
            for metric, (unit, _) in METRICS.items()
        ]
    verdict = (
        stats.INVALID if reasons or not rows else stats.worst([m["verdict"] for row in rows for m in row["metrics"]])
    )
    return {
        "format": FORMAT,
        "version": record.VERSION,
        "verdict": verdict,
        "refused": reasons,
        "results": rows,
        "notes": notes,
    }


def _row(name: str, first: Facts, second: Facts, tolerance: float | None) -> tuple[Facts, list[list[Facts]]]:
    """A configuration that is in both records, and the processes of each side that count."""
    config = Config(*record.key(first))
    quiet = [[each for each in side["processes"] if not each["disturbed"]] for side in (first, second)]
    row: Facts = {
        "label": f"{name}, {config}",
        "config": asdict(config),
        "invalid": [],
        "rounds": min(map(len, quiet)),
        "metrics": [],
        "disturbed": sum(len(side["processes"]) for side in (first, second)) - sum(map(len, quiet)),
        "outputs": "not known from records",
        "notes": [],
    }
    failed = [f"{side} failed: {result['error']}" for side, result in zip("AB", (first, second)) if result["error"]]
    if failed:
        row["invalid"] += failed
        return row, [[], []]
    kept = [side["outputs"] for side in (first, second) if "outputs" in side]
    if first["inputs_sha256"] != second["inputs_sha256"]:
        row["outputs"] = "not comparable, since the inputs differ"
    elif len(kept) == 2:
        reason, row["outputs"] = differing_samples(kept[0], kept[1], tolerance)
        if reason is not None:
            row["invalid"].append(f"outputs differ: {reason}")
    if row["rounds"] < stats.MIN_ROUNDS:
        row["invalid"].append(
            f"undisturbed processes: {len(quiet[0])} of {len(first['processes'])} and {len(quiet[1])} of "
            f"{len(second['processes'])}; {stats.MIN_ROUNDS} on each side are needed"
        )
    return row, quiet


def _left_out(a: Facts, b: Facts, pairs: Sequence[tuple[Facts, Facts]]) -> list[str]:
    """What only one of two records has: nothing is said about it."""
    notes = []
    for side, name, place in ((a, "A", 0), (b, "B", 1)):
        alone = [model["name"] for model in side["models"] if not any(pair[place] is model for pair in pairs)]
        if alone:
            notes.append(f"only in {name}, so not compared: {', '.join(alone)}")
    for pair in pairs:
        keys = [{record.key(result) for result in model["results"]} for model in pair]
        for place, name in enumerate("AB"):
            alone = [str(Config(*key)) for key in sorted(keys[place] - keys[1 - place], key=str)]
            if alone:
                notes.append(f"{pair[0]['name']}: only in {name}, so not compared: {'; '.join(alone)}")
    return notes
