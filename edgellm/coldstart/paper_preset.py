"""The paper's setting: Table 1's four devices in one cell, and Qwen3-14B (CSGO, 5.1)."""

from __future__ import annotations

from edgellm.coldstart.cost_model import ModelCosts, TransformerShape
from edgellm.coldstart.hardware import Device, Radio

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)

_TABLE_1 = (  # c* in TFLOP/s, a, b, r in MB/s, m in GB, uplink power in dBm, metres
    (165, 0.4, 5.1e-4, 5000, 20, 20, 1),
    (70, 0.7, 8.7e-4, 4000, 10, 18, 3),
    (30, 0.8, 1.1e-3, 3000, 8, 15, 5),
    (20, 0.8, 1.8e-3, 2000, 8, 15, 7),
)


def devices() -> tuple[Device, ...]:
    found = []
    for number, (tera, a, b, disk, memory, power, metres) in enumerate(_TABLE_1, 1):
        radio = Radio(160e6, power, 25.0, metres)
        found.append(
            Device(f"Device {number}", tera * 1e12, a, b, disk * 1e6, memory * 1e9, radio.uplink, radio.downlink)
        )
    return tuple(found)


def model() -> ModelCosts:
    """Qwen3-14B in bf16: 660.6 MB a layer; no embedding, no head and no cache, as in the paper."""
    return ModelCosts.of(TransformerShape(40, 5120, 40, 8, 128, 17408), "Qwen3-14B", cached=False)
