"""A home of throttled machines: measured, they are what was asked for, and layers come to where they are used."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from testkit.network.home import GROUPS, Spec, Throttled, home, why_not

SPECS = (
    Spec("laptop", up=100, down=100),
    Spec("desk", up=80, down=160, disk=40, cpu=1.0),
    Spec("phone", up=24, down=48, disk=12, cpu=0.4),
)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Throttled]]:
    if reason := why_not():
        pytest.skip(reason)
    with home(SPECS, tmp_path_factory.mktemp("home"), brief=True) as made, ExitStack() as running:
        for machine in made[1:]:
            running.enter_context(machine.worker())
        yield made
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert not [machine.name for machine in made if machine.name in left]
    assert not [path for machine in made for path in GROUPS.glob(f"*/{machine.name}")]


@pytest.mark.nightly
def test_what_is_measured_is_what_each_machine_was_given(machines: list[Throttled]) -> None:
    laptop, _desk, _phone = machines
    plan = laptop.json("mesh", "plan", "edgellm-verifier", "--tokens-in", "64")
    assert plan["stages"]
    here, desk, phone = laptop.json("mesh", "peers")
    assert (here["name"], desk["name"], phone["name"]) == ("here", "desk", "phone")
    for row, spec in ((desk, SPECS[1]), (phone, SPECS[2])):
        assert 0 < row["speed"]["disk_mb_s"] < 1.5 * spec.disk  # less where others read at the same time
        # to a device at the slower of our uplink and its downlink, and back likewise
        assert row["line"]["up_mbps"] < 1.3 * min(SPECS[0].up, spec.down)
        assert row["line"]["down_mbps"] < 1.3 * min(spec.up, SPECS[0].down)
