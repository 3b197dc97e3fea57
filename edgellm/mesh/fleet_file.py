"""Reading of a file of devices, for `mesh plan --devices`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgellm.coldstart import costs
from edgellm.coldstart.costs import Device, Link, ModelCosts, TransformerShape
from edgellm.errors import InvalidOption, StateDamaged
from edgellm.state import read_toml

PRESETS = ("csgo",)
_MOST = 1e15  # limit of numbers, so that nothing computed from it overflows
MAX_DEVICES = 20

Numbers = Mapping[str, tuple[float, float | None]]
"""The unit of each number of a table, and its default; a number with the default 0 may be 0, and others are above."""
_DEVICE: Numbers = {
    "tflops": (1e12, None), "util_a": (1.0, None), "util_b": (1.0, None), "disk_mb_s": (1e6, None),
    "memory_gb": (1e9, None), "uplink_mbps": (1e6, None), "downlink_mbps": (1e6, None), "latency_ms": (1e-3, 0.0),
    "memory_gb_s": (1e9, 0.0),
}  # fmt: skip
_LINK: Numbers = {"mbps": (1e6, None), "latency_ms": (1e-3, 0.0)}
_MODEL: Numbers = {
    **dict.fromkeys(("layers", "d_model", "heads", "kv_heads", "d_head", "d_ff"), (1.0, None)),
    "bytes_per_weight": (1.0, 2.0),
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """Devices, measured links between some of them, and a model if the file describes one."""

    devices: tuple[Device, ...]
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    model: ModelCosts | None = None


def preset(name: str) -> Fleet:
    """Return a fleet that is known by name: `csgo` is the paper's, with its model.

    Raises `InvalidOption` for another name.
    """
    if name not in PRESETS:
        raise InvalidOption(f"There is no preset named {name!r}.", f"Choose from {', '.join(PRESETS)}.")
    return Fleet(costs.devices(), {}, costs.model())


def read_fleet(path: Path) -> Fleet:
    """Read a file of devices.

    Raises `InvalidOption` if it cannot be read, is not TOML, or has an invalid key or value; the error says which,
    and what is expected.
    """
    try:
        found = read_toml(path.expanduser())
    except StateDamaged as error:
        raise InvalidOption(error.what, "See: edgellm mesh plan --help-all") from None
    if found is None:
        raise InvalidOption(f"There is no file {path}.", "Check the path given to --devices.")
    return _Reader(path).fleet(found)


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path

    def fleet(self, found: Mapping[str, Any]) -> Fleet:
        self._known("the file", found, {"device", "link", "model"})
        tables = self._tables(found, "device")
        if not tables:
            raise self._wrong("it names no device", "Write a [[device]] table for each.")
        if len(tables) > MAX_DEVICES:
            raise self._wrong(f"it names {len(tables)} devices", f"At most {MAX_DEVICES} can be planned for.")
        devices = tuple(self._device(at, table) for at, table in enumerate(tables, 1))
        names = [device.name for device in devices]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise self._wrong(f"two devices are named {twice!r}", "Give each device a unique name.")
        links = dict(self._link(at, table, names) for at, table in enumerate(self._tables(found, "link"), 1))
        model = found.get("model", {})
        if not isinstance(model, dict):
            raise self._wrong(f"model is {model!r}", "Write it as a table: [model].")
        return Fleet(devices, links, self._model(model) if model else None)

    def _device(self, at: int, table: Mapping[str, Any]) -> Device:
        where = f"[[device]] {at}"
        name = table.get("name")
        if not isinstance(name, str) or not name.strip() or len(name) > 64 or not name.isprintable():
            raise self._wrong(f"{where}: name is {name!r}", "Give each device a short name, in quotes.")
        where += f" ({name})"
        flops, util_a, util_b, disk, memory, up, down, latency, bandwidth = self._numbers(where, table, _DEVICE, "name")
        if util_a > 1.0:
            raise self._wrong(f"{where}: util_a is {util_a:g}", "It is the fraction of the peak, at most 1.")
        return Device(name.strip(), flops, util_a, util_b, disk, memory, up, down, latency, bandwidth)

    def _link(self, at: int, table: Mapping[str, Any], names: list[str]) -> tuple[tuple[str, str], Link]:
        where = f"[[link]] {at}"
        rate, latency = self._numbers(where, table, _LINK, "from", "to")
        for end in ("from", "to"):
            if table.get(end) not in names:
                raise self._wrong(f"{where}: {end} is {table.get(end)!r}", f"Name one of {', '.join(names)}.")
        return (table["from"], table["to"]), Link(rate, latency)

    def _model(self, table: Mapping[str, Any]) -> ModelCosts:
        *whole, weight = self._numbers("[model]", table, _MODEL, "name")
        for key, value in zip(_MODEL, whole, strict=False):
            if value != int(value) or (key == "layers" and value > 512):
                raise self._wrong(f"[model]: {key} is {value:g}", "Give a whole number, for layers up to 512.")
        layers, d_model, heads, kv_heads, d_head, d_ff = map(int, whole)
        shape = TransformerShape(layers, d_model, heads, kv_heads, d_head, d_ff, weight)
        return ModelCosts.of(shape, str(table.get("name", "the model in the file")))

    def _numbers(self, where: str, table: Mapping[str, Any], numbers: Numbers, *others: str) -> list[float]:
        """Return the numbers of a table, in their units; it may have `others` beside them."""
        self._known(where, table, {*numbers, *others})
        found = []
        for key, (unit, default) in numbers.items():
            value, least = table.get(key, default), "of 0 or more" if default == 0.0 else "above 0"
            if value is None:
                raise self._wrong(f"{where}: {key} is missing", f"Write {key} = and a number {least}.")
            good = type(value) in (int, float) and 0 <= value <= _MOST  # NaN is not
            if not good or (value == 0 and default != 0.0):
                raise self._wrong(f"{where}: {key} is {repr(value)[:40]}", f"Give a number {least}, at most {_MOST:g}.")
            found.append(unit * float(value))
        return found

    def _tables(self, found: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
        tables = found.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise self._wrong(f"{key} is not a list of tables", f"Write [[{key}]], with two brackets.")
        return tables

    def _known(self, where: str, table: Mapping[str, Any], keys: set[str]) -> None:
        if strange := sorted(set(table) - keys):
            raise self._wrong(f"{where} has an unknown key {strange[0]!r}", f"Known keys: {', '.join(sorted(keys))}.")

    def _wrong(self, what: str, expected: str) -> InvalidOption:
        return InvalidOption(f"In {self.path}, {what}.", expected)
