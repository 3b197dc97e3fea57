"""Files of devices: what is read, and what is said of one that is wrong."""

from pathlib import Path

import pytest

from edgellm.errors import InvalidOption
from edgellm.mesh.fleet_file import read_fleet
from edgellm.state import SMALL

DESKTOP = """\
[[device]]
name = "desktop"
tflops = 20
util_a = 0.4
util_b = 0.001
disk_mb_s = 2000
memory_gb = 16
uplink_mbps = 400
downlink_mbps = 500
"""
LAPTOP = DESKTOP.replace("desktop", "laptop") + "latency_ms = 2.5\nmemory_gb_s = 40\n"
LINK = '[[link]]\nfrom = "laptop"\nto = "desktop"\nmbps = 90\nlatency_ms = 4\n'
MODEL = "[model]\nlayers = 4\nd_model = 64\nheads = 4\nkv_heads = 2\nd_head = 16\nd_ff = 128\nbytes_per_weight = 0.5\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "home.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_devices_links_and_a_model_are_read(tmp_path: Path) -> None:
    found = read_fleet(written(tmp_path, DESKTOP + LAPTOP + LINK + MODEL))
    desktop, laptop = found.devices
    assert (desktop.name, desktop.flops, desktop.disk, desktop.memory) == ("desktop", 20e12, 2e9, 16e9)
    assert (desktop.uplink, desktop.downlink, desktop.latency) == (400e6, 500e6, 0.0)
    assert laptop.latency == pytest.approx(2.5e-3)
    assert (desktop.bandwidth, laptop.bandwidth) == (0.0, 40e9)
    assert found.links["laptop", "desktop"].rate == 90e6
    assert found.model is not None
    assert found.model.shape.layers == 4
    assert found.model.layer_bytes[0] == found.model.shape.weights
    assert found.model.cache_bytes[0] == 4 * 2 * 16


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "cannot be used"),
        ("a = " + "[" * 100_000, "cannot be used"),
        ("", "device: Field required"),
        ("devices = 3\n" + DESKTOP, "devices is 3: Extra inputs are not permitted"),
        (DESKTOP.replace("tflops = 20\n", ""), "device 1 tflops: Field required"),
        (DESKTOP.replace("= 2000", '= "fast"'), "device 1 disk_mb_s is 'fast': Input should be a valid number"),
        (DESKTOP.replace("= 2000", "= 0"), "disk_mb_s is 0: Input should be greater than 0"),
        (DESKTOP.replace("= 2000", "= nan"), "disk_mb_s is nan"),
        (DESKTOP.replace("= 2000", "= 1" + 400 * "0"), "disk_mb_s is 1000"),
        (DESKTOP.replace("= 2000", "= 1" + 5000 * "0"), "cannot be used"),
        (DESKTOP.replace("= 2000", "= true"), "disk_mb_s is True"),
        (DESKTOP.replace("0.4", "40"), "util_a is 40: Input should be less than or equal to 1"),
        (DESKTOP.replace("memory_gb", "memory_mb"), "device 1 memory_mb is 16: Extra inputs"),
        (DESKTOP + DESKTOP, "two devices are named 'desktop'"),
        (DESKTOP + LINK, "no device is named 'laptop'"),
        (DESKTOP + MODEL.replace("= 64", "= 64.5"), "model d_model is 64.5: Input should be a valid integer"),
        (DESKTOP + MODEL.replace("layers = 4", "layers = 4000"), "model layers is 4000: Input should be less"),
        ("".join(DESKTOP.replace("desktop", f"d{at}") for at in range(21)), "at most 20 items"),
        ("#" * (SMALL + 1), "more than 1048576 bytes"),
    ],
)
def test_what_is_wrong_is_said_with_key_value_and_what_is_expected(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        read_fleet(written(tmp_path, text))


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="There is no file"):
        read_fleet(tmp_path / "none.toml")
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidOption, match="cannot be used"):
        read_fleet(tmp_path / "x.toml")
