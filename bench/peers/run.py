"""Peers beside xnnfast: the same networks, weights and inputs, results compared first; a table and a plot.

    python bench/peers/run.py [--models NAME ...] [--rounds 5] [--write]

Makes missing environments first (see environments.py). A round is a fresh process of each peer; when all are warm they
take turns by slices of their samples, forwards and backwards, so that no moment of the machine belongs to one of them.
With one thread they share a CPU, another one in the next round. ``--write`` puts table and plot into
docs/benchmarks.md, between its two marks. Some programs come from --shared, a folder with models exported by
ExecuTorch; without it, the lists of bench/models remain.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(HERE)]

import cases  # noqa: E402
import environments  # noqa: E402
import onnx_export  # noqa: E402
import pte_export  # noqa: E402
import tflite_export  # noqa: E402
import torch_export  # noqa: E402

import xnnfast  # noqa: E402
from xnnfast.bench.measure import LineProcess  # noqa: E402

NAMES = {
    "xnnfast": "xnnfast", "litert": "LiteRT", "executorch": "ExecuTorch", "executorch_numpy": "ExecuTorch (NumPy)",
    "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO (fp32)", "torch": "PyTorch",
}  # fmt: skip
#: Name -> what it is made of: a program in the shared folder, or a list of layers and its precision.
MODELS: dict[str, tuple[str, str]] = {
    "MobileNetV2 fp32": ("mobilenet_v2_fp32_b1", ""),
    "MobileNetV2 int8": ("mobilenet_v2_qs8_b1", ""),
    "BERT-mini fp32, 128 tokens": ("bert_mini_fp32_b1", ""),
    "ResNet-50 fp32": ("resnet50", "fp32"),
    "ResNet-50 int8": ("resnet50", "int8"),
    "encoder 4x256 fp32, 128 tokens": ("encoder_mini", "fp32"),
    "MLP 784-256-128-10 fp32": ("mlp", "fp32"),
}
#: Batch, and threads or workers.
CONFIGS = ((1, 1), (1, 2), (8, 2))
#: Share of the largest number. Rounding once instead of twice moves int8 results, and the int8 MobileNetV2 is fragile:
#: with its random weights it is 20 % from what it is in fp32.
TOLERANCE = {"fp32": 1e-3, "int8": 0.08}
FRAGILE = {"MobileNetV2 int8": 0.25}
#: Parts of a process's samples.
SLICES = 8
#: Seconds that idle threads of OpenMP and others may go on spinning.
SPINNING = 0.25
#: Seconds that a peer may take for anything.
PATIENCE = 600
START, END = "<!-- peers: written by bench/peers/run.py -->", "<!-- end of peers -->"


class Case:
    """A network in the formats of all peers, with inputs and the answer of xnnfast."""

    def __init__(self, name: str, folder: Path, shared: Path | None, site: Path | None) -> None:
        self.name = name
        source, precision = MODELS[name]
        self.precision = "int8" if "int8" in name else "fp32"
        self.files: dict[str, Path] = {}
        self.single = False
        self.missing: dict[str, str] = {}
        folder.mkdir()
        self.folder = folder
        if not precision:
            if shared is None:
                raise FileNotFoundError("needs --shared")
            program = shared / source / "model.pte"
            for peer in ("xnnfast", "executorch", "executorch_numpy"):
                self.files[peer] = program
            self.input = np.load(shared / source / "input_0.npy")
            try:
                self.graph = xnnfast.load(program)
            except xnnfast.UnsupportedError:
                self.graph, self.single = None, True
        else:
            path = folder / "model.xnn"
            cases.build(source, precision=precision).save(path)
            self.files["xnnfast"] = path
            self.graph = xnnfast.load(path)
            program = folder / "model.pte"
            pte_export.export(self.graph, program)
            for peer in ("executorch", "executorch_numpy"):
                self.files[peer] = program
            self.input = cases.example(source, precision=precision)
        self.first = False
        for peer, export, suffix in (
            ("onnxruntime", self._onnx, "onnx"),
            ("litert", lambda path: self._tflite(path, site), "tflite"),
            ("torch", lambda path: torch_export.export(self.graph, path), "npz"),
        ):
            if self.graph is None:
                self.missing[peer] = "the program is more than one graph"
                continue
            path = folder / f"model.{suffix}"
            try:
                export(path)
            except (
                onnx_export.Unknown, tflite_export.Unknown, torch_export.Unknown, FileNotFoundError,
            ) as reason:  # fmt: skip
                self.missing[peer] = str(reason)
            else:
                self.files[peer] = path
        if "onnxruntime" in self.files:
            # It has no kernel for int8 products with limits inside.
            self.files["openvino"] = folder / "model-limits.onnx"
            onnx_export.export(self.graph, self.files["openvino"], fold=False)

    def _onnx(self, path: Path) -> None:
        onnx_export.export(self.graph, path)
        self.first = onnx_export.image_inputs(self.graph)[0]

    def _tflite(self, path: Path, site: Path | None) -> None:
        if site is None:
            raise FileNotFoundError("no environment of LiteRT")
        tflite_export.export(self.graph, path, site)

    def inputs(self, peer: str, batch: int) -> Path:
        """The input's file, laid out as the peer's model wants it."""
        turned = self.first and peer in ("onnxruntime", "openvino")
        path = self.folder / f"input-{batch}-{turned}.npy"
        if not path.exists():
            # Samples that differ, so that a result in the wrong place is noticed.
            rolled = [np.roll(self.input, 7 * i, axis=-1) for i in range(batch)]
            array = np.concatenate(rolled)
            np.save(path, np.ascontiguousarray(array.transpose(0, 3, 1, 2) if turned else array))
        return path


class Child(LineProcess):
    """A process of one peer, which does its job by turns (see peer.py). Ended with the block that holds it."""

    def __init__(self, peer: str, python: Path, job: dict[str, Any], cpus: set[int] | None = None) -> None:
        job = {"peer": peer, **job}
        if peer == "xnnfast":
            job["path"] = str(Path(xnnfast.__path__[0]).parent)
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with _bound(cpus):
            super().__init__([str(python), str(HERE / "peer.py"), json.dumps(job)], variables)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def hear(self, word: str | None = None) -> str:
        """The next line; the one that has to come, if it is known."""
        line = self.next_line(PATIENCE)
        said = (line or "").strip()
        if said and word in (None, said):
            return said
        if said:
            raise RuntimeError(f"said {said[:100]!r} instead of {word!r}")
        last = (self.last_words() or "it had no last words")[:200]
        raise RuntimeError(f"nothing for {PATIENCE} s: {last}" if line is None else last)


@contextlib.contextmanager
def _bound(cpus: set[int] | None) -> Iterator[None]:
    """A process begins where the one that starts it may be, if the system lets it choose."""
    allowed = os.sched_getaffinity(0)
    if cpus is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        if cpus is not None:
            os.sched_setaffinity(0, allowed)


def in_turns(
    case: Case, pythons: dict[str, Path], peers: Sequence[str], batch: int, threads: int, seconds: float, turn: int
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """One round: for each peer, what its process measured, or why it could not."""
    cpus = None
    if threads == 1:
        allowed = sorted(os.sched_getaffinity(0))
        cpus = {allowed[turn % len(allowed)]}
    order = list(peers if turn % 2 == 0 else reversed(peers))
    with contextlib.ExitStack() as stack:
        children: dict[str, Child] = {}
        failed: dict[str, str] = {}

        def ask(peer: str, word: str | None, answer: str | None) -> str | None:
            """What the peer says; None when it is out, and the reason is kept."""
            try:
                if word is not None:
                    children[peer].tell(word)
                return children[peer].hear(answer)
            except RuntimeError as reason:
                # It must not go on beside the others.
                children.pop(peer).process.kill()
                failed[peer] = str(reason)
                return None

        for peer in order:
            job = {
                "model": str(case.files[peer]),
                "inputs": [str(case.inputs(peer, batch))],
                "batch": batch,
                "threads": threads,
                "seconds": seconds,
                "slices": SLICES,
                "output": str(case.folder / f"{peer}.npz"),
                "one_by_one": batch > 1 and peer.startswith("executorch"),
            }
            # This one takes as many threads as there are CPUs, and they would fight for the one.
            free = peer == "executorch_numpy"
            children[peer] = stack.enter_context(Child(peer, pythons[peer], job, None if free else cpus))
            ask(peer, None, "ready")
        for number in range(SLICES):
            for peer in order if number % 2 == 0 else reversed(order):
                if peer in children:
                    # Threads of some spin for a while when their work is done.
                    time.sleep(SPINNING if threads > 1 else 0.0)
                    ask(peer, "go", "done")
        for peer in order:
            said = ask(peer, "end", None) if peer in children else None
            yield peer, failed[peer] if said is None else json.loads(said)


def pythons_of(peers: list[str]) -> dict[str, Path]:
    """The Pythons of xnnfast and of the peers whose environments can be had."""
    pythons = {"xnnfast": Path(sys.executable)}
    for peer in peers:
        try:
            pythons[peer] = environments.make(peer)
        except (subprocess.CalledProcessError, LookupError) as error:
            print(f"{peer}: left out, {error}", file=sys.stderr)
    return pythons


def site_of_litert(pythons: dict[str, Path]) -> Path | None:
    """Where the classes of LiteRT's schema are, which writing its files needs."""
    if "litert" not in pythons:
        return None
    return next((pythons["litert"].parent.parent / "lib").glob("python3*/site-packages"), None)


def difference(a: Path, b: Path) -> float:
    """How far two results are apart, as a share of the largest number; infinity if they are not of one kind."""
    with np.load(a) as one, np.load(b) as other:
        if sorted(one.files) != sorted(other.files):
            return float("inf")
        furthest = 0.0
        for name in one.files:
            x, y = (each.astype(np.float64).reshape(-1) for each in (one[name], other[name]))
            rest = np.isfinite(x)
            # NaN would be the smallest and the largest of differences at once.
            if x.size != y.size or not np.array_equal(rest, np.isfinite(y)):
                return float("inf")
            if not np.array_equal(x[~rest], y[~rest], equal_nan=True):
                return float("inf")
            gap = float(np.abs(x[rest] - y[rest]).max(initial=0.0))
            furthest = max(furthest, gap / max(float(np.abs(x[rest]).max(initial=0.0)), 1e-30))
        return furthest


def compare(options: argparse.Namespace, pythons: dict[str, Path]) -> list[dict[str, Any]]:
    kept = options.json is not None and options.json.exists()
    rows: list[dict[str, Any]] = json.loads(options.json.read_text()) if kept else []
    known = {(row["model"], row["batch"], row["threads"]) for row in rows}
    site = site_of_litert(pythons)
    with tempfile.TemporaryDirectory() as name:
        for number, model in enumerate(options.models):
            if all((model, *config) in known for config in CONFIGS):
                continue
            try:
                case = Case(model, Path(name) / str(number), options.shared, site)
            except FileNotFoundError as reason:
                print(f"{model}: left out, {reason}", file=sys.stderr)
                continue
            for batch, threads in CONFIGS:
                if (model, batch, threads) in known:
                    continue
                row: dict[str, Any] = {"model": model, "batch": batch, "threads": threads, "peers": {}, "missing": {}}
                row["missing"].update(case.missing)
                peers = [peer for peer in pythons if peer in case.files]
                for turn in range(options.rounds):
                    taking_part = [peer for peer in peers if peer not in row["missing"]]
                    for peer, found in in_turns(case, pythons, taking_part, batch, threads, options.seconds, turn):
                        if isinstance(found, str):
                            row["missing"][peer] = found
                        else:
                            row["peers"].setdefault(peer, {"processes": []})["processes"].append(found)
                if "xnnfast" not in row["peers"]:
                    # Nothing to compare with: no figure counts.
                    row["missing"].update(dict.fromkeys(row["peers"], "xnnfast gave no result to compare with"))
                    row["peers"].clear()
                for peer in row["peers"]:
                    gap = difference(case.folder / "xnnfast.npz", case.folder / f"{peer}.npz")
                    row["peers"][peer]["difference"] = gap
                    row["peers"][peer]["equal"] = gap <= FRAGILE.get(model, TOLERANCE[case.precision])
                rows.append(row)
                if options.json is not None:
                    options.json.write_text(json.dumps(rows))
                print(line(row), file=sys.stderr, flush=True)
    return rows


def rate(row: dict[str, Any], peer: str) -> float | None:
    """Samples per second: the median over processes of their medians; None if there is none, or a wrong one."""
    entry = row["peers"].get(peer)
    if entry is None or not entry["equal"]:
        return None
    medians = [statistics.median(each["samples_ns"]) for each in entry["processes"]]
    return row["batch"] * 1e9 / statistics.median(medians)


def line(row: dict[str, Any]) -> str:
    parts = [f"{row['model']}, batch {row['batch']}, {row['threads']} threads:"]
    for peer in NAMES:
        found = rate(row, peer)
        if found is not None:
            parts.append(f"{peer} {found:.4g}/s")
        elif peer in row["peers"]:
            parts.append(f"{peer} WRONG by {row['peers'][peer]['difference']:.2g}")
        elif peer in row["missing"]:
            parts.append(f"{peer} - ({row['missing'][peer]})")
    return " ".join(parts)


# ---------------------------------------------------------------------------------------------------
# Table and plot


def table(rows: list[dict[str, Any]], peers: list[str]) -> list[str]:
    lines = [
        f"| network | batch | threads | {' | '.join(NAMES[peer] for peer in peers)} |",
        f"|---|---|---|{'---|' * len(peers)}",
    ]
    for row in rows:
        rates = {peer: rate(row, peer) for peer in peers}
        best = max((each for each in rates.values() if each is not None), default=None)
        cells = []
        for peer in peers:
            value = rates[peer]
            if value is None:
                wrong = peer in row["peers"]
                cells.append(f"wrong by {100 * row['peers'][peer]['difference']:.0f} %" if wrong else "-")
            else:
                text = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
                cells.append(f"**{text}**" if value == best else text)
        lines.append(f"| {row['model']} | {row['batch']} | {row['threads']} | {' | '.join(cells)} |")
    return lines


def differences(rows: list[dict[str, Any]], peers: list[str]) -> list[str]:
    found: dict[tuple[str, str], float] = {}
    for row in rows:
        for peer in peers:
            if peer != "xnnfast" and peer in row["peers"]:
                key = (row["model"], peer)
                found[key] = max(found.get(key, 0.0), row["peers"][peer]["difference"])
    models = dict.fromkeys(model for model, _ in found)
    return [
        f"{model}: " + ", ".join(f"{NAMES[peer]} {gap:.1g}" for (name, peer), gap in found.items() if name == model)
        for model in models
    ]


def opening(rows: list[dict[str, Any]], peers: list[str]) -> list[str]:
    """Import, file to first result, memory: of the rows with one sample and one thread."""
    lines = ["| network | peer | import ms | file to first result ms | memory added MB |", "|---|---|---|---|---|"]
    for row in rows:
        if (row["batch"], row["threads"]) != (1, 1):
            continue
        for peer in peers:
            entry = row["peers"].get(peer)
            if entry is None:
                continue
            middle = {
                key: statistics.median(each[key] for each in entry["processes"])
                for key in ("import_s", "load_s", "first_s", "model_bytes")
            }
            lines.append(
                f"| {row['model']} | {NAMES[peer]} | {1e3 * middle['import_s']:.0f} | "
                f"{1e3 * (middle['load_s'] + middle['first_s']):.1f} | {middle['model_bytes'] / 1e6:.0f} |"
            )
    return lines


COLOURS = {
    "xnnfast": "#3b76c4", "litert": "#e08a1e", "executorch": "#c2476b", "executorch_numpy": "#b05fb3",
    "onnxruntime": "#2a9d6f", "openvino": "#8a8f98", "torch": "#8b5a2b",
}  # fmt: skip


def plot(rows: list[dict[str, Any]], peers: list[str]) -> str:
    """Bars of samples per second relative to xnnfast, as SVG."""
    width, left, bar = 860, 300, 13
    scale = (width - left - 60) / max(
        [1.0] + [(rate(row, peer) or 0) / (rate(row, "xnnfast") or 1) for row in rows for peer in peers]
    )
    content, y = [], 44.0
    x = left
    for peer in peers:
        content.append(f'<rect x="{x - 280}" y="10" width="11" height="11" fill="{COLOURS[peer]}"/>')
        content.append(f'<text x="{x - 264}" y="20">{NAMES[peer]}</text>')
        x += 28 + 7 * len(NAMES[peer])
    top = y
    for row in rows:
        base = rate(row, "xnnfast")
        if base is None:
            continue
        shown = [(peer, rate(row, peer)) for peer in peers]
        shown = [(peer, value) for peer, value in shown if value is not None]
        middle = y + bar * len(shown) / 2 + 4
        label = f"{row['model']}, batch {row['batch']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        content.append(f'<text x="{left - 8}" y="{middle:.0f}" text-anchor="end">{label}</text>')
        for peer, value in shown:
            length = scale * value / base
            content.append(
                f'<rect x="{left}" y="{y:.0f}" width="{length:.1f}" height="{bar - 2}" fill="{COLOURS[peer]}"/>'
                f'<text x="{left + length + 4:.1f}" y="{y + bar - 4:.0f}" class="v">{value / base:.2f}</text>'
            )
            y += bar
        y += 12
    line_x = left + scale
    content.append(
        f'<line x1="{line_x:.1f}" x2="{line_x:.1f}" y1="{top - 6}" y2="{y:.0f}" stroke="#888" stroke-dasharray="3"/>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 10:.0f}" font-family="sans-serif" '
        'font-size="12"><style>.v{font-size:10px;fill:#555}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(content)}</svg>\n"
    )


def machine() -> str:
    name = platform.machine()
    for each in Path("/proc/cpuinfo").read_text().splitlines():
        if each.startswith("model name"):
            name = each.partition(":")[2].strip()
            break
    return f"{name}, {os.cpu_count()} CPUs, Linux {platform.release()}, {xnnfast.config()['isa'][-1]}"


def report(rows: list[dict[str, Any]], peers: list[str], options: argparse.Namespace, load: float) -> str:
    versions = {
        peer: next((r["peers"][peer]["processes"][0]["version"] for r in rows if peer in r["peers"]), "?")
        for peer in peers
    }
    missing = {f"{NAMES[peer]}, {row['model']}: {why}" for row in rows for peer, why in row["missing"].items()}
    pin = next(each for each in xnnfast.config()["pin"] if each["name"] == "xnnpack")
    # Where files lie is this machine's business.
    names = {"--shared": "DIR", "--json": "FILE"}
    words = [word for word in sys.argv[1:] if word != "--write"]
    shown = shlex.join(names.get(words[i - 1], word) if i else word for i, word in enumerate(words))
    return "\n".join(
        [
            START,
            f"Written on {time.strftime('%Y-%m-%d')} by `python bench/peers/run.py {shown}`.".replace(" `.", "`."),
            f"Machine: {machine()}; load before the run {load:.1f}. "
            f"XNNPACK {pin['version']}; {', '.join(f'{NAMES[peer]} {versions[peer]}' for peer in peers)}.",
            "",
            f"Samples per second, medians of {options.rounds} processes that took turns by slices; the best of a row "
            "in bold. Threads are workers of one thread each in xnnfast's rows with batch 8; ExecuTorch (NumPy) takes "
            "a thread for each CPU in all rows.",
            "",
            *table(rows, peers),
            "",
            "Largest differences of results from xnnfast's, as a share of the largest number: "
            + "; ".join(differences(rows, peers))
            + ".",
            "",
            "![samples per second relative to xnnfast](benchmarks.svg)",
            "",
            "One thread, one sample:",
            "",
            *opening(rows, peers),
            "",
            *(["Not measured:", "", *sorted(f"* {each}" for each in missing), ""] if missing else []),
            END,
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--peers", nargs="+", default=[name for name in NAMES if name != "xnnfast"], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--shared", type=Path, help="folder with programs exported by ExecuTorch")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    parser.add_argument("--json", type=Path, help="keep what is measured, and go on where it ends")
    options = parser.parse_args()
    pythons = pythons_of(options.peers)
    load = os.getloadavg()[0]
    rows = compare(options, pythons)
    peers = list(pythons)
    text = report(rows, peers, options, load)
    print(text)
    if options.write:
        page = ROOT / "docs/benchmarks.md"
        before, _, rest = page.read_text().partition(START)
        page.write_text(before + text + rest.partition(END)[2])
        (ROOT / "docs/benchmarks.svg").write_text(plot(rows, peers))
    wrong = [line(row) for row in rows for entry in row["peers"].values() if not entry["equal"]]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
