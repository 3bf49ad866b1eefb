"""What a dry run knows of a machine: a small file of physical numbers, each with its source beside it.

Datasheets count in powers of ten, and so do the units here but for memory sizes: `gib` is 2**30 bytes, `gb_s` 1e9 bytes
a second. A bandwidth is what one direction reaches in practice where somebody has measured it, and the datasheet's
otherwise, as its comment says.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zofftk.atomic_file import replacing
from zofftk.errors import InputError

THIS = "this"
_FOLDER = Path(__file__).parent / "profiles"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device.

    The efficiency of an operation that does `i` floating-point operations for each element it reads or writes is
    `max_efficiency * i / (i + half_intensity)`: large matrices come near to `max_efficiency`, small ones do not. With a
    `work_exponent`, that is of an operation of a tera of operations, and others have `(work / 1e12) ** work_exponent`
    times as much, up to the peak.
    """

    memory_gib: float
    reserved_gib: float  # context, workspaces and what fragments: no tensor can have it
    peak_16bit_tflops: float
    peak_32bit_tflops: float
    max_efficiency: float
    half_intensity: float
    memory_gb_s: float
    memory_efficiency: float  # of memory_gb_s, for operations that only read and write
    kernel_us: float  # what every operation takes beside its work
    attention_tflops: float = 0.0  # what fused attention reaches; 0: as products of its intensity
    work_exponent: float = 0.0  # how efficiency grows with an operation's work; 0: with its intensity alone
    is_host: bool = False  # no device of its own, but the host's cores and memory: nothing is hidden behind anything


@dataclass(frozen=True, kw_only=True)
class Link:
    """Between a device and its host; `devices` of them share it when all are in use."""

    down_gb_s: float
    up_gb_s: float
    latency_us: float
    devices: int


@dataclass(frozen=True, kw_only=True)
class Host:
    """All of one host, which its devices share."""

    memory_gib: float
    memory_gb_s: float
    adam_ns_per_param: float  # with all cores at work
    task_us: float  # what every task takes beside its work


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Between devices: of one host, each way and device; between hosts, each way and host."""

    devices_per_host: int
    inside_gb_s: float
    between_gb_s: float
    latency_us: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    name: str
    gpu: Gpu
    link: Link
    host: Host
    interconnect: Interconnect

    def shared_by(self, ranks: int) -> Profile:
        """The machine of one of so many ranks on this host: where the device is the host itself, each has a part."""
        if not self.gpu.is_host or ranks == 1:
            return self
        names = ("memory_gib", "peak_16bit_tflops", "peak_32bit_tflops", "attention_tflops", "memory_gb_s")
        parts = {name: getattr(self.gpu, name) / ranks for name in names}
        return dataclasses.replace(
            self,
            gpu=dataclasses.replace(self.gpu, **parts),
            interconnect=dataclasses.replace(self.interconnect, devices_per_host=ranks),
        )


MOST = 1e15  # of any number of a profile, in its unit: what lies above is a slip
_SECTIONS: dict[str, type[Any]] = {"gpu": Gpu, "link": Link, "host": Host, "interconnect": Interconnect}
_MAY_BE_0 = {
    "reserved_gib",
    "half_intensity",
    "kernel_us",
    "latency_us",
    "task_us",
    "attention_tflops",
    "work_exponent",
}
_AT_MOST_1 = {"max_efficiency", "memory_efficiency"}


def profile_names() -> list[str]:
    """Those that come with the package, and `this` where `zofftk doctor --measure` has saved it."""
    names = sorted(path.stem for path in _FOLDER.glob("*.toml"))
    return [*names, THIS] if this_path().exists() else names


def this_path() -> Path:
    """Where the profile of this machine is: in the user's configuration folder (XDG)."""
    home = os.environ.get("XDG_CONFIG_HOME") or ""
    folder = Path(home) if os.path.isabs(home) else Path.home() / ".config"
    return folder / "zofftk" / "this.toml"


def profile_path(name: str | os.PathLike[str]) -> Path:
    """The file that `load_profile` reads."""
    text = os.fspath(name)
    return Path(text) if _is_path(name) else this_path() if text == THIS else _FOLDER / f"{text}.toml"


def _is_path(name: str | os.PathLike[str]) -> bool:
    text = os.fspath(name)
    return isinstance(name, Path) or os.sep in text or text.endswith(".toml")


def load_profile(name: str | os.PathLike[str]) -> Profile:
    """The profile of this name, or in the file at this path (with a folder in it, or ending in `.toml`).

    Raises:
        InputError: no such profile; a file that is none, naming the first entry that is wrong.
    """
    text, path = os.fspath(name), profile_path(name)
    try:
        content = path.read_bytes()
    except OSError as error:
        if _is_path(name):
            raise InputError(f"profile: {path}: {error.strerror}") from None
        if text == THIS:
            raise InputError("profile: this machine has not been measured yet: run zofftk doctor --measure") from None
        known = ", ".join(profile_names())
        raise InputError(f"profile: expected one of {known}, or the path of a file; got {text!r}") from None
    try:
        return parse_profile(tomllib.loads(content.decode()))
    except (InputError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"profile: {path}: {error}") from None


def parse_profile(values: dict[str, Any]) -> Profile:
    """Raises InputError that names the first entry that is missing, unknown or out of range."""
    _check_names(values, {"name", *_SECTIONS}, "")
    if not isinstance(values["name"], str):
        raise InputError(f"name: expected a text, got {values['name']!r}")
    sections = {key: _section(key, kind, values[key]) for key, kind in _SECTIONS.items()}
    gpu = sections["gpu"]
    if gpu.reserved_gib >= gpu.memory_gib:
        raise InputError(f"gpu.reserved_gib: expected less than the {gpu.memory_gib} of memory, got {gpu.reserved_gib}")
    return Profile(name=values["name"], **sections)


def _section(key: str, kind: type[Any], values: Any) -> Any:
    if not isinstance(values, dict):
        raise InputError(f"{key}: expected a table, got {values!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    may_miss = {name for name, field in fields.items() if field.default is not dataclasses.MISSING}
    _check_names(values, set(fields), f"{key}.", may_miss)
    for name, value in values.items():
        if fields[name].type == "bool":
            _check_bool(f"{key}.{name}", value)
        else:
            _check_number(f"{key}.{name}", name, value, whole=fields[name].type == "int")
    return kind(**values)


def _check_names(
    values: dict[str, Any], expected: set[str], prefix: str, may_miss: AbstractSet[str] = frozenset()
) -> None:
    if unknown := sorted(values.keys() - expected):
        raise InputError(f"{prefix}{unknown[0]}: unknown, expected {', '.join(sorted(expected))}")
    if missing := sorted(expected - values.keys() - may_miss):
        raise InputError(f"{prefix}{missing[0]}: missing")


def _check_bool(place: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InputError(f"{place}: expected true or false, got {value!r}")


def _check_number(place: str, name: str, value: Any, *, whole: bool) -> None:
    kinds = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not abs(value) <= MOST:
        raise InputError(f"{place}: expected a {'whole ' if whole else ''}number, got {value!r}")
    if value < 0 or (value == 0 and name not in _MAY_BE_0):
        raise InputError(f"{place}: expected a number above 0, got {value!r}")
    if name in _AT_MOST_1 and value > 1:
        raise InputError(f"{place}: expected a share of at most 1, got {value!r}")


def write_profile(profile: Profile, path: Path, source: str, notes: Mapping[str, str] | None = None) -> None:
    """Write a file that `load_profile` reads.

    `source` says where the numbers come from, `notes` where single ones do: `{"link.devices": "assumed"}`.
    """
    notes = notes or {}
    lines = [f"# {source}", f"name = {_quoted(profile.name)}"]
    for key in _SECTIONS:
        lines += ["", f"[{key}]"]
        for name, value in dataclasses.asdict(getattr(profile, key)).items():
            note = notes.get(f"{key}.{name}")
            if isinstance(value, bool):
                text = str(value).lower()
            else:
                text = repr(value if isinstance(value, int) else float(f"{value:.4g}"))
            lines.append(f"{name} = {text}" + (f"  # {note}" if note else ""))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write("\n".join([*lines, ""]).encode())


def _quoted(text: str) -> str:
    kept = "".join(character if character.isprintable() else " " for character in text)
    return '"' + kept.replace("\\", "\\\\").replace('"', '\\"') + '"'
