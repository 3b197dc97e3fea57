"""A home of throttled machines: measured, they are what was asked for."""

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from testkit.network.home import GROUPS, Spec, home, why_not

SPECS = (
    Spec("laptop", up=100, down=100),
    Spec("desk", up=80, down=160, disk=40, cpu=1.0),
    Spec("phone", up=24, down=48, disk=12, cpu=0.4),
)


@pytest.mark.nightly
def test_what_is_measured_is_what_each_machine_was_given(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with home(SPECS, tmp_path / "home", brief=True) as machines, ExitStack() as running:
        laptop, *others = machines
        for machine in others:
            running.enter_context(machine.worker())
        assert laptop.json("mesh", "plan", "edgellm-verifier", "--tokens-in", "64")["stages"]
        here, desk, phone = laptop.json("mesh", "peers")
    assert (here["name"], desk["name"], phone["name"]) == ("here", "desk", "phone")
    for row, spec in ((desk, SPECS[1]), (phone, SPECS[2])):
        assert 0 < row["speed"]["disk_mb_s"] < 1.5 * spec.disk  # less where others read at the same time
        # to a device at the slower of our uplink and its downlink, and back likewise
        assert row["line"]["up_mbps"] < 1.3 * min(SPECS[0].up, spec.down)
        assert row["line"]["down_mbps"] < 1.3 * min(spec.up, SPECS[0].down)
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert not [machine.name for machine in machines if machine.name in left]
    assert not [path for machine in machines for path in GROUPS.glob(f"*/{machine.name}")]
