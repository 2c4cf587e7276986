"""Static XNNPACK archives: the pinned sources are obtained, checked, corrected and built, all outside the source tree.

What comes in is PIN, changes.py and a compiler; what goes out is a `Built` naming headers, archives in link order and
facts. Every result is kept under a key of all that could change it, so the second call only computes the key.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent
SOURCES_VARIABLE = "XNNFAST_XNNPACK_SOURCES"
CACHE_VARIABLE = "XNNFAST_BUILD_CACHE"
ARCHIVE_SUFFIX = ".orig.tar.xz"
COMPONENTS = ("xnnpack", "pthreadpool", "cpuinfo", "fxdiv", "fp16")

# To be raised when this file changes what it builds in a way that the tables below do not show.
RECIPE = 1

CMAKE_OPTIONS: dict[str, str] = {
    "XNNPACK_LIBRARY_TYPE": "static",
    "XNNPACK_BUILD_TESTS": "OFF",
    "XNNPACK_BUILD_BENCHMARKS": "OFF",
    "XNNPACK_BUILD_ALL_MICROKERNELS": "OFF",
    "XNNPACK_ENABLE_KLEIDIAI": "OFF",
    "CPUINFO_LIBRARY_TYPE": "static",
    # cpuinfo would otherwise write to the stderr of whoever imports the package, for example where /sys is hidden.
    "CPUINFO_LOG_LEVEL": "none",
    "PTHREADPOOL_LIBRARY_TYPE": "static",
    "CMAKE_POSITION_INDEPENDENT_CODE": "ON",
    "CMAKE_BUILD_TYPE": "Release",
    # pthreadpool and FXdiv ask for CMake 3.5's rules, which CMake 4 refuses to imitate unless told to.
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    "FETCHCONTENT_FULLY_DISCONNECTED": "ON",
}
# Hidden, because other wheels in the same process bring other versions of the same names.
FLAGS = ("-fvisibility=hidden", "-ffunction-sections", "-fdata-sections")
TARGETS = ("XNNPACK", "microkernels-prod", "cpuinfo", "pthreadpool")
# In link order: each may only need symbols of those after it.
ARCHIVES = ("libXNNPACK.a", "libmicrokernels-prod.a", "libcpuinfo.a", "libpthreadpool.a")
LIBRARIES = ("m", "pthread")
HEADERS: dict[str, tuple[str, str]] = {
    "xnnpack.h": ("xnnpack", "include/xnnpack.h"),
    "experiments-config.h": ("xnnpack", "include/experiments-config.h"),
    # Not public: the only place that tells which instruction sets XNNPACK selects on the running processor.
    "xnnpack/hardware-config.h": ("xnnpack", "src/xnnpack/hardware-config.h"),
    "xnnpack/common.h": ("xnnpack", "src/xnnpack/common.h"),
    # Our own, which load_changes().add_own() puts there.
    "xnnfast/loop-order.h": ("xnnpack", "src/xnnfast/loop-order.h"),
    "xnnfast/isa-cap.h": ("xnnpack", "src/xnnfast/isa-cap.h"),
    "xnnfast/second-isa.h": ("xnnpack", "src/xnnfast/second-isa.h"),
    "pthreadpool.h": ("pthreadpool", "include/pthreadpool.h"),
    "cpuinfo.h": ("cpuinfo", "include/cpuinfo.h"),
}

# Debian releases that carry the pinned versions. The older one has every package for good; unstable moves on, but its
# package pool is where a version is found that the older one has listed and lost.
SUITES = ("trixie", "sid")
KEYRINGS = ("/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.pgp")
DEBIAN_SUITE = re.compile(
    r"(oldoldstable|oldstable|stable|testing|unstable|sid|buster|bullseye|bookworm|trixie|forky|duke)"
    r"(-updates|-backports|-proposed-updates)?"
)
NETWORK_SECONDS = 300
#: Where the archives lie in a source distribution; a checkout has no such folder.
BUNDLED = HERE / "sources"
#: Architectures, by the names that both compilers and Linux use, between which a cross compiler is recognized.
CROSS = ("x86_64", "aarch64")


class BuildError(RuntimeError):
    """The archives cannot be had; the message says what was tried and what would help."""


class Unavailable(Exception):
    """One way of obtaining a component does not lead there; the text is the reason. Another way may."""


# --- pin -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pin:
    """One version of one component that may be built. `tree_sha256` is the sum over the unpacked files (tree_sum)."""

    name: str
    version: str
    commit: str
    sha256: str
    tree_sha256: str
    licence: str
    upstream: str

    @property
    def archive(self) -> str:
        """File name of the source archive, as Debian gives it."""
        return f"{self.name}_{self.version}{ARCHIVE_SUFFIX}"

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"


def parse_stanzas(text: str) -> list[dict[str, str]]:
    """The paragraphs of a `Field: value` text, names in lower case; apt's .sources files and PIN are written so."""
    stanzas: list[dict[str, str]] = []
    current: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if not line.strip():
            if current:
                stanzas.append(current)
            current, name = {}, ""
        elif line[0] in " \t":
            if name:
                current[name] = f"{current[name]}\n{line.strip()}".strip()
        else:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            current[name] = value.strip()
    if current:
        stanzas.append(current)
    return stanzas


def read_pin(path: Path = HERE / "PIN") -> dict[str, list[Pin]]:
    """Component → its acceptable versions, the preferred one first."""
    pins: dict[str, list[Pin]] = {}
    for stanza in parse_stanzas(path.read_text("utf-8")):
        missing = [f.name for f in dataclasses.fields(Pin) if not stanza.get(_pin_field(f.name))]
        if missing:
            raise BuildError(f"{path.name}: a paragraph ({stanza.get('name', 'unnamed')}) lacks {', '.join(missing)}")
        pin = Pin(**{f.name: stanza[_pin_field(f.name)] for f in dataclasses.fields(Pin)})
        for what, value, digits in (
            ("commit", pin.commit, 40),
            ("sha256", pin.sha256, 64),
            ("tree_sha256", pin.tree_sha256, 64),
        ):
            if not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
                raise BuildError(f"{path.name}: {what} of {pin.label} must be {digits} hex digits, found {value!r}")
        pins.setdefault(pin.name, []).append(pin)
    if set(pins) != set(COMPONENTS):
        raise BuildError(
            f"{path.name} must pin {', '.join(COMPONENTS)}; it pins {', '.join(sorted(pins)) or 'nothing'}"
        )
    return {name: pins[name] for name in COMPONENTS}


def _pin_field(name: str) -> str:
    return {"sha256": "archive-sha256", "tree_sha256": "tree-sha256"}.get(name, name)


# --- sums ------------------------------------------------------------------------------------------------------------


def file_sum(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def tree_sum(root: Path) -> str:
    """SHA-256 over the names and contents of all files under `root`, in hex.

    Owners, times and modes are left out, since they differ between an archive and a git checkout of the same commit;
    so is git's own folder at the top. A link counts with its target.
    """
    lines = []
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        if here == root and ".git" in folders:
            folders.remove(".git")
        links = [name for name in folders if (here / name).is_symlink()]
        for name in files + links:
            path = here / name
            if path.is_symlink():
                kind, digest = "link", hashlib.sha256(os.readlink(path).encode()).hexdigest()
            else:
                kind, digest = "file", file_sum(path)
            lines.append(f"{path.relative_to(root).as_posix()}\0{kind}\0{digest}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def check_sum(path: Path, wanted: str, found: str) -> None:
    """Raise BuildError unless the sums agree: a mismatch ends the build, as going on would hide a damaged file."""
    if found != wanted:
        raise BuildError(f"{path}: its SHA-256 must be {wanted}, found {found}; remove or replace it")


# --- ways to the sources ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Where the checked source of a component lies: an archive or a tree. Neither is ever written to."""

    pin: Pin
    way: str
    path: Path

    def unpack(self, target: Path) -> None:
        """A fresh copy at `target`, safe to write to."""
        if self.path.is_dir():
            shutil.copytree(self.path, target, symlinks=True, ignore=lambda folder, _: {".git"})
        else:
            _extract(self.path, target)
        # An archive of Debian's was checked as a whole; what git packed has no sum of its own.
        if not self.path.name.endswith(ARCHIVE_SUFFIX):
            check_sum(self.path, self.pin.tree_sha256, tree_sum(target))


def _extract(archive: Path, target: Path) -> None:
    """Unpack, so that `target` is the top of the sources whether or not the archive wraps them in a folder."""
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(scratch, filter="data")
        else:
            tar.extractall(scratch)
    entries = list(scratch.iterdir())
    if len(entries) == 1 and entries[0].is_dir():
        entries[0].rename(target)
        scratch.rmdir()
    else:
        scratch.rename(target)


class Way(Protocol):
    """One way of obtaining components."""

    name: str

    def obtain(self, alternatives: Sequence[Pin]) -> Source:
        """The first of the versions that can be had, with its sum checked; Unavailable with the reason if none can."""


class FolderWay:
    """A folder of archives under Debian's file name, or of trees named `cpuinfo` or `cpuinfo-<version>`.

    It is the one that the user names, or the one that comes with a source distribution.
    """

    def __init__(
        self, folder: str | None, name: str = "folder", absent: str = f"{SOURCES_VARIABLE} is not set"
    ) -> None:
        self.folder = Path(folder).expanduser() if folder else None
        self.name = name
        self.absent = absent

    def obtain(self, alternatives: Sequence[Pin]) -> Source:
        if self.folder is None:
            raise Unavailable(self.absent)
        if not self.folder.is_dir():
            raise BuildError(f"{SOURCES_VARIABLE} names {self.folder}, which is not a folder")
        for pin in alternatives:
            archive = self.folder / pin.archive
            if archive.is_file():
                check_sum(archive, pin.sha256, file_sum(archive))
                return Source(pin, self.name, archive)
            tree = self.folder / f"{pin.name}-{pin.version}"
            if tree.is_dir():
                check_sum(tree, pin.tree_sha256, tree_sum(tree))
                return Source(pin, self.name, tree)
        name = alternatives[0].name
        tree = self.folder / name
        if tree.is_dir():
            found = tree_sum(tree)
            for pin in alternatives:
                if pin.tree_sha256 == found:
                    return Source(pin, self.name, tree)
            check_sum(tree, " or ".join(pin.tree_sha256 for pin in alternatives), found)
        others = sorted(path.name for path in self.folder.glob(f"{name}[_-]*"))
        holds = f"; it holds {', '.join(others)}, which is not pinned" if others else ""
        raise Unavailable(f"{self.folder} holds neither {alternatives[0].archive} nor a folder {name}{holds}")


class CacheWay:
    """What an earlier build downloaded."""

    name = "cache"

    def __init__(self, downloads: Path) -> None:
        self.downloads = downloads

    def obtain(self, alternatives: Sequence[Pin]) -> Source:
        for pin in alternatives:
            archive = self.downloads / f"{pin.sha256}{ARCHIVE_SUFFIX}"
            if archive.is_file():
                if file_sum(archive) == pin.sha256:
                    return Source(pin, self.name, archive)
                # Ours alone, and its name says what it must be: a damaged copy is simply fetched again.
                archive.unlink(missing_ok=True)
            tree = self.downloads / f"{pin.commit}.tar"
            if tree.is_file():
                return Source(pin, self.name, tree)
        raise Unavailable("nothing downloaded earlier")


@dataclass(frozen=True)
class AptEntry:
    """One entry of apt's configuration, whichever of the two formats it was written in."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str


def parse_one_line(text: str) -> list[AptEntry]:
    """Entries of a sources.list: `deb [options] uri suite component…`."""
    entries = []
    for line in text.splitlines():
        match = re.match(r"\s*deb(?:-src)?\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)([^#]*)", line)
        if match:
            options, uri, suite, components = match.groups()
            signed_by = re.search(r"signed-by=(\S+)", options or "")
            entries.append(AptEntry((uri,), (suite,), tuple(components.split()), signed_by[1] if signed_by else ""))
    return entries


def parse_deb822(text: str) -> list[AptEntry]:
    """Entries of a .sources file that are not switched off."""
    entries = []
    for stanza in parse_stanzas(text):
        if stanza.get("enabled", "yes").lower() in ("no", "false", "0", "off", "without", "disable"):
            continue
        uris, suites, components = (tuple(stanza.get(name, "").split()) for name in ("uris", "suites", "components"))
        entries.append(AptEntry(uris, suites, components, stanza.get("signed-by", "")))
    return entries


def debian_mirrors(sources_list: Path, sources_parts: Path) -> list[str]:
    """The mirrors of Debian's main archive that apt is configured for, the most certain first.

    Others' repositories may use Debian's release names, so they come last; what they serve would fail on Debian's keys.
    """
    entries: list[AptEntry] = []
    for path in [sources_list, *sorted(sources_parts.glob("*"))]:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.suffix == ".sources":
                entries += parse_deb822(path.read_text("utf-8"))
            elif path == sources_list or path.suffix == ".list":
                entries += parse_one_line(path.read_text("utf-8"))
    ranked: dict[str, int] = {}
    for entry in entries:
        if "main" not in entry.components or not any(DEBIAN_SUITE.fullmatch(suite) for suite in entry.suites):
            continue
        for uri in entry.uris:
            if "security" in uri or uri.startswith("cdrom:"):
                continue
            sure = "debian-archive" in entry.signed_by or (not entry.signed_by and uri.rstrip("/").endswith("/debian"))
            uri = uri.rstrip("/")
            ranked[uri] = min(ranked.get(uri, 1), 0 if sure else 1)
    return sorted(ranked, key=ranked.__getitem__)


class AptWay:
    """Debian's source packages, fetched by apt from the machine's own mirror into folders of ours; needs no root.

    Only the archive is asked for: the .dsc of some of the pinned versions is gone from some mirrors.
    """

    name = "apt"

    def __init__(self, downloads: Path, scratch: Path) -> None:
        self.downloads = downloads
        self.scratch = scratch
        self._sessions: list[_AptSession] | None = None
        self._unusable = ""

    def obtain(self, alternatives: Sequence[Pin]) -> Source:
        if self._unusable:
            raise Unavailable(self._unusable)
        if self._sessions is None:
            try:
                self._sessions = self._open()
            except Unavailable as error:
                self._unusable = str(error)
                raise
        reasons = []
        for pin in alternatives:
            for session in self._sessions:
                try:
                    archive = session.fetch(pin)
                except Unavailable as error:
                    reasons.append(str(error))
                    continue
                check_sum(archive, pin.sha256, file_sum(archive))
                kept = self.downloads / f"{pin.sha256}{ARCHIVE_SUFFIX}"
                archive.replace(kept)
                return Source(pin, self.name, kept)
        raise Unavailable("; ".join(dict.fromkeys(reasons)))

    def _open(self) -> list[_AptSession]:
        for program in ("apt-get", "apt-cache"):
            if not shutil.which(program):
                raise Unavailable(f"{program} is not on PATH")
        keyring = next((path for path in KEYRINGS if os.access(path, os.R_OK)), None)
        if keyring is None:
            raise Unavailable(f"{KEYRINGS[0]} is missing (package debian-archive-keyring)")
        sources_list, sources_parts = _apt_source_paths()
        mirrors = debian_mirrors(sources_list, sources_parts)
        if not mirrors:
            raise Unavailable(f"no mirror of Debian's main archive in {sources_list} or {sources_parts}")
        return [_AptSession(self.scratch / f"apt{number}", mirror, keyring) for number, mirror in enumerate(mirrors)]


def _apt_source_paths() -> tuple[Path, Path]:
    """apt's sources.list and the folder beside it, where this machine's configuration puts them."""
    paths = {"LIST": "/etc/apt/sources.list", "PARTS": "/etc/apt/sources.list.d"}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(
            ["apt-config", "shell", "LIST", "Dir::Etc::sourcelist/f", "PARTS", "Dir::Etc::sourceparts/d"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
        paths.update(re.findall(r"^(LIST|PARTS)='(.+)'$", answer, re.MULTILINE))
    return Path(paths["LIST"]), Path(paths["PARTS"])


class _AptSession:
    """apt with a sources list, state and cache of our own, for one mirror."""

    def __init__(self, folder: Path, mirror: str, keyring: str) -> None:
        self.folder = folder
        self.mirror = mirror
        self.keyring = keyring
        self._problem: str | None = None
        self._dead = ""

    @property
    def shown(self) -> str:
        """The mirror without a user name or password, for messages."""
        return re.sub(r"//[^/@]*@", "//", self.mirror)

    def fetch(self, pin: Pin) -> Path:
        """The archive as apt verified it against the signed lists; its sum is still to be compared with the pin."""
        if self._problem is None:
            self._problem = self._update()
            if self._problem and not any((self.folder / "lists").glob("*_Sources*")):
                self._dead = f"{self.shown}: no package list ({self._problem})"
        if self._dead:
            raise Unavailable(self._dead)
        code, answer = self._run("apt-cache", "showsrc", pin.name)
        versions = [
            stanza["version"]
            for stanza in parse_stanzas(answer)
            if stanza.get("package") == pin.name and stanza.get("version", "").rpartition("-")[0] == pin.version
        ]
        if not versions:
            also = f" ({self._problem})" if self._problem else ""
            raise Unavailable(f"{self.shown} lists no {pin.version} in {' or '.join(SUITES)}{also}")
        answer = ""
        for version in dict.fromkeys(versions):
            code, answer = self._run(
                "apt-get", "-q", "source", "--download-only", "--tar-only", f"{pin.name}={version}"
            )
            archive = self.folder / pin.archive
            if code == 0 and archive.is_file():
                return archive
        raise Unavailable(f"{self.shown} lists {pin.version} but does not serve it ({_apt_complaint(answer)})")

    def _update(self) -> str:
        """Fetch the signed lists; "" or what apt complained about. One of the suites may still be usable then."""
        for part in ("lists/partial", "archives/partial", "empty"):
            (self.folder / part).mkdir(parents=True)
        (self.folder / "status").touch()
        (self.folder / "sources.list").write_text(
            "".join(f"deb-src [signed-by={self.keyring}] {self.mirror} {suite} main\n" for suite in SUITES)
        )
        settings = {
            "Dir::State": "",
            "Dir::State::lists": "lists",
            "Dir::State::status": "status",
            "Dir::State::extended_states": "extended_states",
            "Dir::Cache": "",
            "Dir::Cache::archives": "archives",
            "Dir::Cache::pkgcache": "pkgcache.bin",
            "Dir::Cache::srcpkgcache": "srcpkgcache.bin",
            "Dir::Etc::sourcelist": "sources.list",
            "Dir::Etc::sourceparts": "empty",
            "Dir::Etc::preferences": "preferences",
            "Dir::Etc::preferencesparts": "empty",
        }
        lines = [f'{name} "{self.folder / value}";' for name, value in settings.items()]
        lines += [
            # Otherwise apt calls it a success to have fetched no list at all.
            'APT::Update::Error-Mode "any";',
            'Acquire::AllowInsecureRepositories "false";',
            'APT::Get::AllowUnauthenticated "false";',
            'Acquire::Retries "2";',
            'Acquire::http::Timeout "30";',
            'Acquire::https::Timeout "30";',
            # Root's apt would hand downloads to a user who cannot enter this folder.
            'APT::Sandbox::User "root";',
            # The machine's hooks are about its own package lists, not about ours.
            "#clear APT::Update::Pre-Invoke;",
            "#clear APT::Update::Post-Invoke;",
            "#clear APT::Update::Post-Invoke-Success;",
        ]
        (self.folder / "apt.conf").write_text("\n".join(lines) + "\n")
        code, answer = self._run("apt-get", "-q", "update")
        return "" if code == 0 else _apt_complaint(answer)

    def _run(self, program: str, *arguments: str) -> tuple[int, str]:
        try:
            result = subprocess.run(
                # -c is read after the machine's settings: its proxies stay, its folders do not.
                [program, "-c", str(self.folder / "apt.conf"), *arguments],
                cwd=self.folder,
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=NETWORK_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return 124, f"E: no answer within {NETWORK_SECONDS} s"
        return result.returncode, result.stdout


def _apt_complaint(answer: str) -> str:
    lines = [re.sub(r"//[^/@ ]*@", "//", line.strip()) for line in answer.splitlines()]
    return " ".join([line for line in lines if line.startswith("E:")][:2]) or (lines[-1] if lines else "no output")


class GitWay:
    """The upstream repositories at the pinned commits. The commit id is the check, and the sum of the unpacked tree."""

    name = "git"

    def __init__(self, downloads: Path, scratch: Path) -> None:
        self.downloads = downloads
        self.scratch = scratch
        self._unusable = ""

    def obtain(self, alternatives: Sequence[Pin]) -> Source:
        if not self._unusable and not shutil.which("git"):
            self._unusable = "git is not on PATH"
        reasons: list[str] = []
        for pin in alternatives:
            if self._unusable:
                raise Unavailable("; ".join([*reasons, self._unusable]))
            try:
                return Source(pin, self.name, self._fetch(pin))
            except Unavailable as error:
                reasons.append(f"{pin.version}: {error}")
        raise Unavailable("; ".join(reasons))

    def _fetch(self, pin: Pin) -> Path:
        repository = self.scratch / f"git-{pin.name}-{pin.commit}"
        self._git("init", "--quiet", "--bare", str(repository))
        where = ("--git-dir", str(repository))
        self._git(*where, "fetch", "--quiet", "--depth", "1", "--no-tags", pin.upstream, pin.commit)
        found = self._git(*where, "rev-parse", "--verify", "FETCH_HEAD^{commit}").strip()
        if found != pin.commit:
            raise BuildError(f"{pin.upstream}: asked for commit {pin.commit}, was given {found}")
        partial = repository / "tree.tar"
        self._git(*where, "archive", "--format=tar", "--output", str(partial), pin.commit)
        kept = self.downloads / f"{pin.commit}.tar"
        partial.replace(kept)
        return kept

    def _git(self, *arguments: str) -> str:
        try:
            result = subprocess.run(
                ["git", *arguments],
                env={
                    **os.environ,
                    "LC_ALL": "C",
                    "GIT_TERMINAL_PROMPT": "0",
                    "GIT_HTTP_LOW_SPEED_LIMIT": "1000",
                    "GIT_HTTP_LOW_SPEED_TIME": "30",
                },
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=NETWORK_SECONDS,
            )
        except subprocess.TimeoutExpired:
            # The next repository would keep us waiting just as long.
            self._unusable = f"no answer within {NETWORK_SECONDS} s"
            raise Unavailable(self._unusable) from None
        if result.returncode:
            lines = result.stderr.strip().splitlines()
            raise Unavailable(lines[-1] if lines else f"git ended with status {result.returncode}")
        return result.stdout


def obtain(pins: Mapping[str, Sequence[Pin]], ways: Sequence[Way]) -> dict[str, Source]:
    """A checked source for every component, each by the first way that has it; ways may be mixed.

    Components that cannot be had are reported together, with the reason of every way.
    """
    sources: dict[str, Source] = {}
    missing: dict[str, Sequence[Pin]] = {}
    reasons: dict[str, dict[str, str]] = {way.name: {} for way in ways}
    for name, alternatives in pins.items():
        for way in ways:
            try:
                sources[name] = way.obtain(alternatives)
                break
            except Unavailable as error:
                reasons[way.name][name] = str(error)
        else:
            missing[name] = alternatives
    if missing:
        raise BuildError(_nothing_helped(missing, reasons))
    return sources


def _nothing_helped(missing: Mapping[str, Sequence[Pin]], reasons: Mapping[str, Mapping[str, str]]) -> str:
    lines = ["these sources could not be obtained:"]
    lines += [f"  {' or '.join(pin.label for pin in alternatives)}" for alternatives in missing.values()]
    lines += ["What was tried, in this order:"]
    for way, by_name in reasons.items():
        said = {name: by_name[name] for name in missing}
        if len(set(said.values())) == 1:
            lines.append(f"  {way}: {next(iter(said.values()))}")
        else:
            lines += [f"  {way}, {name}: {reason}" for name, reason in said.items()]
    lines += ["Any of these helps:", f"  set {SOURCES_VARIABLE} to a folder that holds, packed or unpacked,"]
    lines += [f"    {alternatives[0].archive}" for alternatives in missing.values()]
    lines += ["  on Debian, install apt and debian-archive-keyring, and let apt reach a mirror"]
    lines += ["  install git and let it reach the upstream repositories"]
    return "\n".join(lines)


# --- compiler and tools ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiler:
    """The compilers CMake will be given: their commands, and what they say they are."""

    c: str
    cxx: str
    c_version: str
    cxx_version: str
    target: str

    @property
    def machine(self) -> str:
        """The architecture compiled for, as ``uname -m`` would call it there."""
        asked = self.target.partition("-")[0]
        return asked if asked in CROSS else platform.machine()


def find_compiler(environment: Mapping[str, str] = os.environ) -> Compiler:
    """The C and C++ compilers named by CC and CXX, or the first on PATH."""
    c = _one_compiler(environment, "CC", "C", ("cc", "gcc", "clang"))
    cxx = _one_compiler(environment, "CXX", "C++", ("c++", "g++", "clang++"))
    return Compiler(c, cxx, _first_line(c, "--version"), _first_line(cxx, "--version"), _first_line(c, "-dumpmachine"))


def _one_compiler(environment: Mapping[str, str], variable: str, language: str, names: Sequence[str]) -> str:
    asked = environment.get(variable, "").strip()
    if asked:
        if not shutil.which(shlex.split(asked)[0], path=environment.get("PATH")):
            raise BuildError(f"{variable} is {asked!r}, which cannot be run; correct it, or unset it to use {names[0]}")
        return asked
    for name in names:
        if shutil.which(name, path=environment.get("PATH")):
            return name
    raise BuildError(
        f"no {language} compiler: none of {', '.join(names)} is on PATH. Install gcc and g++ 12 or newer, or clang "
        f"(on Debian: build-essential), or set {variable}"
    )


def _first_line(command: str, option: str) -> str:
    try:
        result = subprocess.run([*shlex.split(command), option], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the compiler {command!r} cannot be run: {error}") from error
    lines = result.stdout.strip().splitlines()
    if result.returncode or not lines:
        raise BuildError(f"the compiler {command!r} does not answer {option}: {result.stderr.strip()[-300:]}")
    return lines[0]


def find_tool(program: str, module: str, attribute: str) -> str:
    """Path of a build tool: out of its Python package if that is installed, as in an isolated build, else from PATH."""
    with contextlib.suppress(ImportError):
        folder = getattr(importlib.import_module(module), attribute, None)
        if folder and (found := shutil.which(program, path=str(folder))):
            return found
    found = shutil.which(program)
    if not found:
        raise BuildError(f"{program} is missing: install the Python package {module}, or {program} from the system")
    return found


# --- cache -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """What an extension needs: `-I` folders, archives in link order, and the facts of build-info.json.

    Link with `-l` of `info["libraries"]` after the archives. `licenses` are the texts to ship with a binary.
    """

    include_dirs: list[str]
    archives: list[str]
    info: dict[str, Any]
    licenses: list[str] = field(default_factory=list)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where downloads and products are kept; never inside the source tree."""
    if own := environment.get(CACHE_VARIABLE):
        return Path(own).expanduser().absolute()
    if xdg := environment.get("XDG_CACHE_HOME"):
        return Path(xdg).absolute() / "xnnfast"
    return Path("~/.cache/xnnfast").expanduser()


def cache_key(
    compiler: Compiler,
    *,
    pin: bytes,
    changes: bytes,
    options: Mapping[str, str] = CMAKE_OPTIONS,
    flags: Sequence[str] = FLAGS,
    machine: str | None = None,
) -> str:
    """Hex digits that differ whenever the product could."""
    facts = {
        "recipe": RECIPE,
        "pin": hashlib.sha256(pin).hexdigest(),
        "changes": hashlib.sha256(changes).hexdigest(),
        "options": dict(options),
        "flags": list(flags),
        "targets": TARGETS,
        "archives": ARCHIVES,
        "headers": HEADERS,
        # The words given in CC may hold options of their own (-m32), so they count beside the version.
        "compiler": [_portable(compiler.c), compiler.c_version, _portable(compiler.cxx), compiler.cxx_version],
        "target": compiler.target,
        "machine": machine or f"{platform.system()} {compiler.machine}",
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def _portable(command: str) -> str:
    """A compiler command without its folder, which says nothing about what it compiles."""
    words = shlex.split(command)
    return shlex.join([Path(words[0]).name, *words[1:]])


def load(product: Path) -> Built | None:
    """The product in that folder, or None if it is absent or incomplete."""
    try:
        info = json.loads((product / "build-info.json").read_text("utf-8"))
        archives = [product / "lib" / archive["file"] for archive in info["archives"]]
        if any(path.stat().st_size != archive["size"] for path, archive in zip(archives, info["archives"])):
            return None
    except (OSError, ValueError, KeyError):
        return None
    return Built(
        include_dirs=[str(product / "include")],
        archives=[str(path) for path in archives],
        info=info,
        licenses=[str(path) for path in sorted((product / "licenses").iterdir())],
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Wait for other builds of the same key; False where files cannot be locked, so that several may run at once.

    That is slow but does no harm: each works in its own folder, and the first to finish is kept (_publish).
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            locked = False
        else:
            locked = True
        yield locked


def _publish(finished: Path, product: Path) -> None:
    """Put a finished product in its place in one step; if another build was faster, its product stays."""
    for _ in range(2):
        try:
            finished.rename(product)
            return
        except OSError:
            if load(product) is not None:
                return
            # A product that lost a file is worth nothing to anybody.
            shutil.rmtree(product, ignore_errors=True)
    raise BuildError(f"{product} can be neither used nor replaced; remove it")


# --- build -----------------------------------------------------------------------------------------------------------


def cached() -> Built | None:
    """The product that `ensure` would return without building, or None."""
    compiler = find_compiler()
    return load(_product(cache_folder(), _key(compiler)))


def ensure(jobs: int | None = None, verbose: bool = True) -> Built:
    """The archives for this machine, built if they are not cached; BuildError says what is missing."""
    compiler = find_compiler()
    cache, key = cache_folder(), _key(compiler)
    product = _product(cache, key)
    if built := load(product):
        return built
    say = _say if verbose else _quiet
    _make_folders(cache)
    with _locked(cache / "locks" / key) as alone:
        if built := load(product):
            return built
        if alone:
            # Left by a build that was killed, since nobody else is building this key.
            for stale in (cache / "work").glob(f"{key}-*"):
                shutil.rmtree(stale, ignore_errors=True)
        started = time.monotonic()
        work = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=cache / "work"))
        try:
            finished = _build(compiler, key, cache, work, jobs or _cores(), say)
            _publish(finished, product)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        say(f"XNNPACK: built in {time.monotonic() - started:.0f} s, kept in {product}")
    built = load(product)
    if built is None:
        raise BuildError(f"{product} was written but cannot be read back")
    return built


def fetch_only(folder: Path, verbose: bool = True) -> list[Path]:
    """Checked sources put into `folder`, in the form that XNNFAST_XNNPACK_SOURCES takes.

    They are archives, except that what only git could provide becomes an unpacked tree.
    """
    say = _say if verbose else _quiet
    cache = cache_folder()
    _make_folders(cache)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with tempfile.TemporaryDirectory(dir=cache / "work") as scratch:
        for source in obtain(read_pin(), _ways(cache, Path(scratch))).values():
            say(f"XNNPACK: {source.pin.label} by {source.way}")
            if source.path.name.endswith(ARCHIVE_SUFFIX):
                target = folder / source.pin.archive
                shutil.copyfile(source.path, target)
            else:
                target = folder / f"{source.pin.name}-{source.pin.version}"
                shutil.rmtree(target, ignore_errors=True)
                source.unpack(target)
            written.append(target)
    return written


def _make_folders(cache: Path) -> None:
    try:
        for folder in ("built", "downloads", "locks", "logs", "work"):
            (cache / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        raise BuildError(f"the build cache {cache} cannot be made ({why}); set {CACHE_VARIABLE}") from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _quiet(text: str) -> None:
    pass


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _key(compiler: Compiler) -> str:
    return cache_key(compiler, pin=(HERE / "PIN").read_bytes(), changes=load_changes().content())


def _product(cache: Path, key: str) -> Path:
    return cache / "built" / key


def _ways(cache: Path, scratch: Path) -> list[Way]:
    downloads = cache / "downloads"
    return [
        FolderWay(os.environ.get(SOURCES_VARIABLE)),
        FolderWay(str(BUNDLED) if BUNDLED.is_dir() else None, "bundled", "this is no source distribution"),
        CacheWay(downloads),
        AptWay(downloads, scratch),
        GitWay(downloads, scratch),
    ]


def load_changes() -> Any:
    """The module changes.py beside this file, which is in no package."""
    name = "xnnfast_vendor_changes"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / "changes.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look their own module up while it is being executed.
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _build(compiler: Compiler, key: str, cache: Path, work: Path, jobs: int, say: Callable[[str], None]) -> Path:
    """Build in `work`; the folder of the finished product, not yet in its place."""
    cmake, ninja = find_tool("cmake", "cmake", "CMAKE_BIN_DIR"), find_tool("ninja", "ninja", "BIN_DIR")
    sources = obtain(read_pin(), _ways(cache, work))
    trees = {name: work / "source" / name for name in sources}
    (work / "source").mkdir()
    for name, source in sources.items():
        say(f"XNNPACK: {source.pin.label} by {source.way}")
        source.unpack(trees[name])

    changes = load_changes()
    try:
        own = changes.add_own(trees)
        applied = changes.apply(trees)
    except changes.ChangeError as error:
        raise BuildError(str(error)) from error

    build = work / "build"
    log = cache / "logs" / f"{key}.log"
    # The archives must be the same wherever they were built, and tell nobody where that was.
    flags = " ".join([*FLAGS, f"-ffile-prefix-map={work}=xnnpack"])
    options = {
        **CMAKE_OPTIONS,
        # CMake downloads whatever of these it is not told about, at other commits.
        **{f"{name.upper()}_SOURCE_DIR": str(trees[name]) for name in COMPONENTS[1:]},
        "CMAKE_C_FLAGS": flags,
        "CMAKE_CXX_FLAGS": flags,
        "CMAKE_MAKE_PROGRAM": ninja,
        "Python_EXECUTABLE": sys.executable,
    }
    if compiler.machine != platform.machine():
        # CMake takes a compiler for a native one unless told the system; XNNPACK chooses kernels by the processor.
        options.update(CMAKE_SYSTEM_NAME=platform.system(), CMAKE_SYSTEM_PROCESSOR=compiler.machine)
    # Flags and CMake settings of the surroundings would change the product behind the key's back.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CMAKE_") and name not in ("CFLAGS", "CXXFLAGS", "ASMFLAGS", "LDFLAGS")
    }
    environment.update(CC=compiler.c, CXX=compiler.cxx, LC_ALL="C")
    log.write_bytes(b"")
    configure = [cmake, "-G", "Ninja", "-S", str(trees["xnnpack"]), "-B", str(build)]
    _logged([*configure, *(f"-D{name}={value}" for name, value in options.items())], environment, log, "configure")
    if downloads := [path.name for path in build.glob("*-download")]:
        raise BuildError(f"CMake went for sources of its own: {', '.join(downloads)} (log: {log})")
    say(f"XNNPACK: compiling about a thousand files with {jobs} jobs; a minute and a half on two cores")
    _logged([ninja, "-C", str(build), "-j", str(jobs), *TARGETS], environment, log, "build")
    return _collect(compiler, key, work, sources, trees, applied, own)


def _logged(command: Sequence[str], environment: Mapping[str, str], log: Path, step: str) -> None:
    with log.open("ab") as output:
        code = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ).returncode
    if code:
        tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-30:])
        raise BuildError(f"the XNNPACK {step} failed with status {code}; the end of {log}:\n{tail}")


def kernel_families(build: Path) -> dict[str, int]:
    """Instruction-set family → number of its micro-kernel files in the product, for the families that are in it.

    Read from the lists CMake compiled from, since that is what happened, whatever the options asked for.
    """
    compiled = set((build / "prod_microkernel_srcs.txt").read_text().split())
    families = {}
    for path in sorted((build / "cmake" / "gen").glob("*_microkernels.cmake")):
        match = re.search(r"^SET\(PROD_\w+_MICROKERNEL_SRCS([^)]*)\)", path.read_text(), re.MULTILINE)
        count = len(compiled.intersection(match[1].split())) if match else 0
        if count:
            families[path.name.removesuffix("_microkernels.cmake")] = count
    return families


def _collect(
    compiler: Compiler,
    key: str,
    work: Path,
    sources: Mapping[str, Source],
    trees: Mapping[str, Path],
    applied: Iterable[Any],
    own: Sequence[str],
) -> Path:
    """Gather headers, archives, licences and facts into a folder; build-info.json comes last and makes it complete."""
    build, finished = work / "build", work / "product"
    for folder in ("include/xnnpack", "include/xnnfast", "lib", "licenses"):
        (finished / folder).mkdir(parents=True)
    for target, (component, header) in HEADERS.items():
        shutil.copyfile(trees[component] / header, finished / "include" / target)
    for name, tree in trees.items():
        shutil.copyfile(tree / "LICENSE", finished / "licenses" / f"{name}.txt")
    archives = []
    for name in ARCHIVES:
        found = list(build.rglob(name))
        if len(found) != 1:
            raise BuildError(f"the build must leave one {name}, it left {len(found)}")
        content = found[0].read_bytes()
        if os.fsencode(work) in content:
            raise BuildError(f"{name} contains the path of the build folder")
        (finished / "lib" / name).write_bytes(content)
        archives.append({"file": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    families = kernel_families(build)
    info = {
        "key": key,
        "pin": [
            {
                "name": source.pin.name,
                "version": source.pin.version,
                "commit": source.pin.commit,
                "sha256": source.pin.sha256,
                "licence": source.pin.licence,
                "upstream": source.pin.upstream,
                "way": source.way,
            }
            for source in sources.values()
        ],
        "changes": [dataclasses.asdict(change) for change in applied],
        "own": list(own),
        "compiler": {"c": compiler.c_version, "cxx": compiler.cxx_version, "target": compiler.target},
        "machine": compiler.machine,
        "options": CMAKE_OPTIONS,
        "flags": [*FLAGS, "-ffile-prefix-map"],
        "families": families,
        "avx512amx": "avx512amx" in families,
        "avx512fp16": "avx512fp16" in families,
        "archives": archives,
        "libraries": list(LIBRARIES),
    }
    (finished / "build-info.json").write_text(json.dumps(info, indent=1) + "\n", "utf-8")
    return finished


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Obtain and build the pinned XNNPACK as static archives.")
    parser.add_argument("--print-info", action="store_true", help="print build-info.json instead of the paths")
    parser.add_argument("--fetch-only", metavar="DIR", type=Path, help="only put the checked sources into DIR")
    parser.add_argument("--jobs", type=int, metavar="N", help="compile N files at a time (default: one per core)")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.fetch_only:
            for path in fetch_only(chosen.fetch_only):
                print(path)
            return 0
        built = ensure(chosen.jobs)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if chosen.print_info:
        print(json.dumps(built.info, indent=1))
    else:
        print("\n".join([*built.include_dirs, *built.archives]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
