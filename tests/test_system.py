"""What differs between systems: each way on this one, and the fallback where it is missing."""

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edgellm import system


def elsewhere(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)


def test_a_file_in_use_is_not_locked_by_others(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with path.open("rb") as one, path.open("rb") as other:
        system.lock_shared(one)
        with pytest.raises(OSError, match="unavailable"):
            system.lock_exclusive(other)
    with path.open("rb") as one:
        system.lock_exclusive(one)
        assert not one.closed


def test_locked_parts_of_a_file_are_seen_by_whoever_opens_it_and_never_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "file").open("w+b") as one, (tmp_path / "file").open("r+b") as two:
        parts = [(0, 2), (2**40, 1), (7, 5)]
        for start, size in parts:
            system.lock_part(one.fileno(), start, size)
        assert sorted(system.locked_parts(two.fileno())) == sorted(parts)
        assert list(system.locked_parts(one.fileno())) == []
        system.lock_part(two.fileno(), 8, 1)
        system.unlock_part(one.fileno(), *parts.pop())
        assert sorted(system.locked_parts(two.fileno())) == sorted(parts)
        elsewhere(monkeypatch, "win32")
        assert list(system.locked_parts(two.fileno())) == []


def test_files_have_owners_and_modes_where_systems_know_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.touch(0o644)
    assert system.is_mine(path.stat())
    assert not system.is_mine(SimpleNamespace(st_uid=os.getuid() + 1))  # type: ignore[arg-type]
    assert system.user() == str(os.getuid())
    elsewhere(monkeypatch, "win32")
    with path.open("rb") as file:
        system.close_to_others(file.fileno())
        assert path.stat().st_mode & 0o777 == 0o644
        assert system.is_mine(SimpleNamespace(st_uid=os.getuid() + 1))  # type: ignore[arg-type]
        assert system.user() == "0"
        elsewhere(monkeypatch, "linux")
        system.close_to_others(file.fileno())
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("platform", ["linux", "win32", "aix"])
def test_pages_are_dropped_as_systems_permit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    elsewhere(monkeypatch, platform)
    with (tmp_path / "file").open("w+b") as file:
        system.read_at_random(file.fileno())
        system.drop_pages(file.fileno())


def test_limits_and_figures_of_the_process_are_missing_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (system.address_space() or 0) > 2**20
    assert sum(ran for ran, _ in system.thread_times().values()) > 0
    assert not system.is_stopped(os.getpid())
    assert system.running_threads() > 0
    system.limit("RLIMIT_NONE", 5)
    elsewhere(monkeypatch, "win32")
    monkeypatch.setattr(system, "_THREADS", Path("/none"))
    system.limit("RLIMIT_CPU", 0)  # would end the tests
    assert system.address_space() is None
    assert system.thread_times() == {}
    assert not system.is_stopped(2**30)


# --- processors -----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of eight processors, of which the first four are two cores of two threads each."""
    monkeypatch.setattr(system, "_PROCESSORS", tmp_path)
    monkeypatch.setattr(system, "_HYBRID", tmp_path / "cpu_core")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for cpu in range(8):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        siblings = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" if cpu < 4 else str(cpu)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(siblings)
    return tmp_path


def test_intels_efficient_cores_do_not_count(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "cpu_core").write_text("0-3\n")
    assert system.performance_cores() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 6, 7})
    assert system.performance_cores() == 3, "where no other may be used, they do"


def test_small_cores_of_a_phone_do_not_count(machine: Path) -> None:
    for cpu, capacity in enumerate((1024, 1024, 1024, 1024, 780, 780, 280, 280)):
        (machine / f"cpu{cpu}" / "cpu_capacity").write_text(str(capacity))
    assert system.performance_cores() == 4


def test_a_list_of_processors_is_read() -> None:
    assert system.processor_list("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert system.processor_list("\n") == set()
    with pytest.raises(ValueError, match="invalid"):
        system.processor_list("?")


def test_a_macs_performance_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch, "darwin")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=b"6\n"))
    assert system.performance_cores() == 6

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None if logical else 3)
    assert system.performance_cores() == 3
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert system.performance_cores() == os.cpu_count()
    assert system.allowed_processors() == frozenset(range(os.cpu_count() or 1))


GROUP = "the free memory of its control group"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, str]], None]:
    """Put this process into control groups with these files."""

    def set_groups(own: str, files: dict[str, str]) -> None:
        monkeypatch.setattr(system, "OWN_GROUPS", tmp_path / "own")
        monkeypatch.setattr(system, "CONTROL_GROUPS", tmp_path / "groups")
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16_000, available=9_000))
    return set_groups


@pytest.mark.parametrize(
    ("own", "files", "total", "available"),
    [
        ("", {}, 16_000, 9_000),
        ("0::/", {}, 16_000, 9_000),
        ("0::/", {"memory.max": "900", "memory.current": "200"}, 900, 700),  # a container
        ("0::/a/b", {"a/memory.max": "900", "a/memory.current": "200", "a/b/memory.max": "max",
                     "a/b/memory.current": "100"}, 900, 700),
        ("0::/a/b", {"a/memory.max": "900", "a/memory.current": "200", "a/b/memory.max": "800",
                     "a/b/memory.current": "0"}, 800, 700),  # the one above has less left
        ("0::/a", {"a/memory.max": "900", "a/memory.current": "890",
                   "a/memory.stat": "anon 15\nactive_file 20\ninactive_file 60"}, 900, 90),  # files give way
        ("0::/a", {"a/memory.max": "900", "a/memory.current": "950"}, 900, 0),
        ("0::/a", {"a/memory.max": "99999", "a/memory.current": "1"}, 16_000, 9_000),
        ("0::/a", {"a/memory.max": "?", "a/memory.current": ""}, 16_000, 9_000),
        ("5:cpu:/\n4:memory:/a", {"memory/a/memory.limit_in_bytes": "900", "memory/a/memory.usage_in_bytes": "100",
                                 "memory/memory.limit_in_bytes": str(2**62)}, 900, 800),
        ("4:memory:/docker/1f", {"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "100"},
         900, 800),  # in a container, which sees its own group alone
        ("4:memory,hugetlb:/a\n0::/", {"memory/a/memory.limit_in_bytes": "900", "memory/a/memory.usage_in_bytes": "1"},
         900, 899),
        ("nonsense", {"memory.max": "900", "memory.current": "200"}, 16_000, 9_000),
    ],
)  # fmt: skip
def test_memory_is_what_the_control_groups_leave(
    groups: Callable[[str, dict[str, str]], None], own: str, files: dict[str, str], total: int, available: int
) -> None:
    groups(own, files)
    assert system.total_memory() == total
    assert system.available_memory() == (available, GROUP if available < 9_000 else "the machine's free memory")


@pytest.mark.parametrize(
    ("own", "files", "whole"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "?"}, None),
        ("0::/", {"cpu.max": "1 0"}, None),
        ("0::/", {}, None),
        ("3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "250000", "cpu/a/cpu.cfs_period_us": "100000"}, 3),
        ("3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_processor_quota_is_rounded_up(
    groups: Callable[[str, dict[str, str]], None], own: str, files: dict[str, str], whole: int | None
) -> None:
    groups(own, files)
    assert system.processor_quota() == whole


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system gives it back itself")
def test_what_is_mapped_of_a_file_is_given_back_and_can_be_read_again(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 2**25
    path.write_bytes(b"7" * size)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:] == b"7" * size
        before = system.mapped_memory()
        system.release_mapped(path)
        after = system.mapped_memory()
        assert before is not None
        assert after is not None
        assert before - after > size // 2
        assert mapped[-1:] == b"7"
