"""The differences between Linux, macOS and Windows. Every function has a fallback, so no other module asks for the
system. At the end are edgellm's own folders, of which `EDGELLM_HOME` moves all that are written.

`mypy --platform win32` and `--platform darwin` check this package as it would run there.
"""

import ctypes
import mmap
import operator
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import platformdirs

if sys.platform != "win32":
    import fcntl
    import resource

BINARY: int = getattr(os, "O_BINARY", 0)
NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)
"""A flag of `os.open`: a link is not followed; on Windows it is."""
NOT_BLOCKING: int = getattr(os, "O_NONBLOCK", 0) | BINARY
"""Flags of `os.open`: a pipe is not waited for, and bytes are as they are in the file."""
NOT_INHERITED: int = getattr(os, "O_CLOEXEC", 0)
HAS_MODES = os.name != "nt"
"""True where files have owners and modes; on Windows a user's folders are private by other means."""
SHARES_CORES = sys.platform == "linux"
"""True where parts of a file can be locked, so that processes see which other processes compute and are alive."""
_LOCK = struct.Struct("hhqqi4x")  # Linux's `struct flock`
_THREADS, _PROCESSORS = Path("/proc/self/task"), Path("/sys/devices/system/cpu")
_HYBRID = Path("/sys/devices/cpu_core/cpus")  # performance cores of Intel's hybrid processors
CONTROL_GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Linux's paths of the limits of control groups (cgroup), and of the list of this process's groups."""
_MEMORY_FILES = (("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current"))


def lock_shared(file: BinaryIO) -> None:
    """Lock an open file until it is closed, beside other shared locks; on Windows an open file cannot be removed."""
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_SH)


def lock_exclusive(file: BinaryIO) -> None:
    """Lock an open file until it is closed. On Windows close it, which allows its removal unless others have it open.
    Raise OSError if others have locked it."""
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        file.close()


def lock_part(file: int, start: int, size: int) -> None:
    """Lock bytes of an open file until they are unlocked or the file is closed, unless others have; only on Linux."""
    if sys.platform == "linux":
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, size, 0))


def unlock_part(file: int, start: int, size: int) -> None:
    """Unlock bytes of an open file."""
    if sys.platform == "linux":
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, size, 0))


def locked_parts(file: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the size of each part of an open file that whoever has opened it again has locked."""
    if sys.platform == "linux":
        gaps = [(0, 2**62)]
        while gaps:
            start, end = gaps.pop()
            asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
            kind, _, first, size, _ = _LOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))
            if kind != fcntl.F_UNLCK:
                yield first, size
                gaps += [gap for gap in ((start, first), (first + size, end)) if gap[0] < gap[1]]
    yield from ()


def is_mine(found: os.stat_result) -> bool:
    """Return whether a file belongs to this user; True where files have no owners."""
    if sys.platform != "win32":
        return found.st_uid == os.getuid()
    return True


def user() -> str:
    """Return the user's number, "0" where there is none."""
    if sys.platform == "win32":
        return "0"
    return str(os.getuid())


def close_to_others(file: int) -> None:
    """Remove other users' access to an open file, where files have modes."""
    if sys.platform != "win32":
        os.fchmod(file, 0o600)


def sync_folder(folder: Path) -> None:
    """Sync `folder`, so that names of new files in it outlive a power cut, where the system supports that."""
    if sys.platform != "win32":
        with suppress(OSError):
            at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(at)
            finally:
                os.close(at)


def read_at_random(file: int) -> None:
    """Tell the system that a file is not read in order: some systems would read megabytes ahead."""
    if sys.platform == "linux":
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def drop_pages(file: int) -> None:
    """Drop a file's pages from memory, or read it past the cache, as far as the system permits it."""
    if sys.platform == "linux":
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    elif sys.platform == "darwin":
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_NOCACHE, 1)


def limit(name: str, value: int, *, soft: bool = False) -> None:
    """Set a limit such as RLIMIT_CORE, for good unless `soft`; do nothing where the system lacks the limit."""
    if sys.platform != "win32" and hasattr(resource, name):
        number = getattr(resource, name)
        _, most = resource.getrlimit(number)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        with suppress(OSError, ValueError):
            resource.setrlimit(number, (value, most if soft else value))


def address_space() -> int | None:
    """Return the bytes of address space that this process has; None where the system does not tell."""
    return _pages(0)


def mapped_memory() -> int | None:
    """Return the bytes of files that this process has in memory; None where the system does not tell."""
    return _pages(2)


def _pages(column: int) -> int | None:
    """Return the bytes in a column of this process's memory; None where the system does not tell."""
    if sys.platform == "linux":
        with suppress(OSError), open("/proc/self/statm", "rb") as pages:  # noqa: PTH123
            return int(pages.read().split()[column]) * os.sysconf("SC_PAGE_SIZE")
    return None


def release_mapped(path: Path) -> None:
    """Release this process's memory of a read-only mapped file, which is read again when needed; on Linux only."""
    if sys.platform != "linux":
        return
    with suppress(OSError, ValueError, AttributeError):
        real, advise = str(path.resolve()), ctypes.CDLL(None).madvise
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            addresses, access, *_, name = line.split(maxsplit=5)
            if name == real and "w" not in access:
                start, end = (int(address, 16) for address in addresses.split("-"))
                advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def be_killed_first() -> None:
    """Have the system end this process first when memory runs out, where the system supports that."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def thread_times() -> dict[str, tuple[int, int]]:
    """Return the nanoseconds that each thread of this process has run, and has waited for a processor; empty where the
    system does not tell."""
    found = {}
    with suppress(OSError):
        for thread in os.listdir(_THREADS):  # noqa: PTH208
            with suppress(OSError, ValueError):  # the thread has just ended, or the kernel lacks the file
                running, waiting, _ = (_THREADS / thread / "schedstat").read_text(encoding="ascii").split()
                found[thread] = int(running), int(waiting)
    return found


def started_at(process: int) -> float | None:
    """Return the start of a process in seconds since the epoch; None if no process has that number, or it has ended."""
    import psutil

    with suppress(psutil.Error):
        found = psutil.Process(process)
        return None if found.status() == psutil.STATUS_ZOMBIE else float(found.create_time())
    return None


def end_process(process: int) -> None:
    """Ask a process to end, as SIGTERM does; on Windows end it."""
    import psutil

    with suppress(psutil.Error):
        psutil.Process(process).terminate()


def is_stopped(process: int) -> bool:
    """Return whether a process was stopped by a signal or a debugger; False where that is unknown."""
    with suppress(OSError):
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return status.rpartition(")")[2].split()[0] in ("T", "t")
    return False


def total_memory() -> int:
    """Return the bytes of memory of this machine, or of this process's control groups where they have less."""
    import psutil

    return min((int(psutil.virtual_memory().total), *(limit for limit, _ in _memory_limits())))


def available_memory() -> tuple[int, str]:
    """Return the free bytes, and their bound: the machine's memory, or this process's control groups."""
    import psutil

    machine = int(psutil.virtual_memory().available), "the machine's free memory"
    groups = ((left, "the free memory of its control group") for _, left in _memory_limits())
    return min((machine, *groups), key=operator.itemgetter(0))


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit in bytes, and the bytes left, of each control group that has a limit. Files that a group keeps in
    memory are given up for programs."""
    for group in _control_groups("memory"):
        cached = 0
        with suppress(OSError, ValueError):
            values = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            cached = sum(int(values.get(name, 0)) for name in ("active_file", "inactive_file"))
        for names in _MEMORY_FILES:
            with suppress(OSError, ValueError):  # "max": no limit
                limit, used = (int((group / name).read_text(encoding="ascii")) for name in names)
                yield limit, max(0, limit - used + cached)


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups that may limit what `controller` counts, and of the groups
    above them. In a container the topmost folder is the container's own group."""
    with suppress(OSError, ValueError):
        for line in OWN_GROUPS.read_text(encoding="utf-8").splitlines():
            _number, controllers, place = line.split(":", 2)
            if controller in controllers.split(",") or not controllers:  # version 2 names no controllers
                root = CONTROL_GROUPS / (controller if controllers else "")
                folder = root / place.lstrip("/")
                yield from (group for group in (folder, *folder.parents) if group.is_relative_to(root))


def processor_quota() -> int | None:
    """Return the processors' worth of time that the control groups grant, rounded up; None without a limit."""
    granted, old = [], ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    for group in _control_groups("cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):  # "max" or -1: no limit
            try:
                quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
            except FileNotFoundError:
                quota, period = ((group / name).read_text(encoding="ascii") for name in old)
            if int(quota) > 0:
                granted.append(-(-int(quota) // int(period)))
    return min(granted, default=None)


def processor() -> str:
    """Return the processor's name."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()[:100]
    return (platform.processor() or platform.machine() or "unknown")[:100]


def processor_flags() -> frozenset[str]:
    """Return the processor's features by Linux's names, such as avx2: some of them on Windows, none if unknown."""
    if sys.platform == "win32":
        present = ctypes.CDLL("kernel32").IsProcessorFeaturePresent
        # PF_AVX2_INSTRUCTIONS_AVAILABLE, with which every processor has the other three, and PF_AVX512F_…
        flags = {40: ("avx2", "fma", "f16c", "bmi2"), 41: ("avx512f",)}
        return frozenset(flag for feature, names in flags.items() if present(feature) for flag in names)
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def allowed_processors(thread: int = 0) -> frozenset[int]:
    """Return the processors that this process, or a thread, may use; all of them where that is unknown."""
    if sys.platform == "linux":
        with suppress(OSError):
            return frozenset(os.sched_getaffinity(thread))
    return frozenset(range(os.cpu_count() or 1))


def performance_cores() -> int:
    """Return the number of physical cores that this process may use, without efficiency cores.

    Linux: by the affinity mask, the capacity of each processor, and Intel's list of performance cores. macOS: the cores
    of the first performance level. Elsewhere, or where the system does not tell, all physical cores.
    """
    if sys.platform == "linux":
        return len({_siblings(cpu) for cpu in fast_processors(allowed_processors())})
    if sys.platform == "darwin":
        with suppress(OSError, ValueError, subprocess.SubprocessError):
            words = ["/usr/sbin/sysctl", "-n", "hw.perflevel0.physicalcpu"]
            return max(1, int(subprocess.run(words, capture_output=True, check=True, timeout=5.0).stdout))
    import psutil

    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def fast_processors(processors: Collection[int]) -> Collection[int]:
    """Return the `processors` of performance cores, with half of the best one's capacity or more; all of them where the
    system does not tell cores apart."""
    with suppress(OSError, ValueError):
        return processor_list(_HYBRID.read_text(encoding="ascii")) & set(processors) or processors
    capacity: dict[int, int] = {}
    for cpu in processors:
        with suppress(OSError, ValueError):
            capacity[cpu] = int((_PROCESSORS / f"cpu{cpu}" / "cpu_capacity").read_text(encoding="ascii"))
    best = max(capacity.values(), default=0)
    return [cpu for cpu in processors if 2 * capacity.get(cpu, best) >= best]


def processor_list(text: str) -> set[int]:
    """Return the numbers of a list such as 0-3,8. Raise ValueError for another text."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}


def _siblings(cpu: int) -> str:
    with suppress(OSError):
        return (_PROCESSORS / f"cpu{cpu}" / "topology/thread_siblings_list").read_text(encoding="ascii").strip()
    return str(cpu)


def may_have_card() -> bool:
    """Return whether there may be a graphics card: on Linux, whether a driver has made a device for one."""
    drivers = ("/dev/dri", "/dev/nvidiactl", "/dev/dxg")
    return sys.platform != "linux" or any(Path(device).exists() for device in drivers)


def running_threads() -> int:
    """Return the number of running or runnable threads of the system; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0])
    return 0


def config_file() -> Path:
    """Return the path of the settings file, which need not exist."""
    return _folder("config", platformdirs.user_config_path) / "config.toml"


def data_dir() -> Path:
    """Return the folder of data that is costly to recreate, such as profiles of pairs. It need not exist."""
    return _folder("data", platformdirs.user_data_path)


def cache_dir() -> Path:
    """Return the folder of data that can be recreated, such as fingerprints and shards. It need not exist."""
    return _folder("cache", platformdirs.user_cache_path)


def state_dir() -> Path:
    """Return the folder of runtime state, such as crash logs. It need not exist."""
    return _folder("state", platformdirs.user_state_path)


def bundled_dirs() -> tuple[Path, Path]:
    """Return the folders that may hold the bundled models: that of an installed package, and that of a checkout."""
    package = Path(__file__).parent
    return package / "bundled", package.parent / "models"


def _folder(name: str, usual: Callable[[str], Path]) -> Path:
    home = os.environ.get("EDGELLM_HOME")
    return Path(home).expanduser() / name if home else usual("edgellm")
