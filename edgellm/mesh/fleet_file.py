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
MAX_BYTES = 2**20
_MOST = 1e15  # limit of numbers, so that nothing computed from it overflows
MAX_DEVICES = 20

_DEVICE = {"tflops": 1e12, "util_a": 1.0, "util_b": 1.0, "disk_mb_s": 1e6, "memory_gb": 1e9, "uplink_mbps": 1e6,
           "downlink_mbps": 1e6}  # fmt: skip
_MODEL = ("layers", "d_model", "heads", "kv_heads", "d_head", "d_ff")


@dataclass(frozen=True, slots=True)
class Fleet:
    """Devices, measured links between some of them, and a model if the file describes one. `waited` as for `Home`."""

    devices: tuple[Device, ...]
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    model: ModelCosts | None = None
    waited: float = 0.0


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
        found = read_toml(path.expanduser(), MAX_BYTES)
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
        self._known(where, table, {"name", "latency_ms", "memory_gb_s", *_DEVICE})
        values = [unit * self._number(where, table, key, above=0.0) for key, unit in _DEVICE.items()]
        if values[1] > 1.0:
            raise self._wrong(f"{where}: util_a is {values[1]:g}", "It is the fraction of the peak, at most 1.")
        latency = 1e-3 * self._number(where, table, "latency_ms", default=0.0)
        bandwidth = 1e9 * self._number(where, table, "memory_gb_s", default=0.0)
        flops, util_a, util_b, disk, memory, uplink, downlink = values
        return Device(name.strip(), flops, util_a, util_b, disk, memory, uplink, downlink, latency, bandwidth)

    def _link(self, at: int, table: Mapping[str, Any], names: list[str]) -> tuple[tuple[str, str], Link]:
        where = f"[[link]] {at}"
        self._known(where, table, {"from", "to", "mbps", "latency_ms"})
        for end in ("from", "to"):
            if table.get(end) not in names:
                raise self._wrong(f"{where}: {end} is {table.get(end)!r}", f"Name one of {', '.join(names)}.")
        rate = 1e6 * self._number(where, table, "mbps", above=0.0)
        return (table["from"], table["to"]), Link(rate, 1e-3 * self._number(where, table, "latency_ms", default=0.0))

    def _model(self, table: Mapping[str, Any]) -> ModelCosts:
        self._known("[model]", table, {"name", "bytes_per_weight", *_MODEL})
        whole = []
        for key in _MODEL:
            value = self._number("[model]", table, key, above=0.0)
            if value != int(value) or (key == "layers" and value > 512):
                raise self._wrong(f"[model]: {key} is {value:g}", "Give a whole number, for layers up to 512.")
            whole.append(int(value))
        weight = self._number("[model]", table, "bytes_per_weight", default=2.0, above=0.0)
        layers, d_model, heads, kv_heads, d_head, d_ff = whole
        shape = TransformerShape(layers, d_model, heads, kv_heads, d_head, d_ff, weight)
        return ModelCosts.of(shape, str(table.get("name", "the model in the file")))

    def _number(
        self, where: str, table: Mapping[str, Any], key: str, default: float | None = None, above: float | None = None
    ) -> float:
        value = table.get(key, default)
        least = "above 0" if above is not None else "of 0 or more"
        if value is None:
            raise self._wrong(f"{where}: {key} is missing", f"Write {key} = and a number {least}.")
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _MOST  # NaN is not
        if not good or (above is not None and value <= above):
            raise self._wrong(f"{where}: {key} is {repr(value)[:40]}", f"Give a number {least}, at most {_MOST:g}.")
        return float(value)

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
