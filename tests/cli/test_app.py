"""Whatever happens, the user sees one clear line and a script sees the right exit code; pages of help lose nothing."""

import re
import shlex
import signal
import subprocess
import sys
from importlib import reload
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from edgellm import cli
from edgellm.cli.app import SHORT, pages
from edgellm.cli.options import option_texts
from edgellm.errors import EdgeError
from edgellm.rpc.trust.trust import Peers
from edgellm.storage import model_files
from tests.cli.conftest import Edge, commands
from tests.programs import run_python

ROOT = Path(__file__).parents[2]


def start_endless(*words: str) -> Any:
    """`edgellm` with a reply that goes on until it is stopped."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cli.endless", *words],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_unexpected_is_one_line_and_a_log(edge: Edge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def explode(*_: object) -> list[object]:
        raise ZeroDivisionError("\x1b[2J" + "surprise"[::-1])

    monkeypatch.setattr(model_files, "list_models", explode)
    done = edge("ls")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert not {"Traceback", "\x1b"} & {*done.err.split(), *done.err}
    assert "ZeroDivisionError" in done.err
    assert "esirprus" in done.err
    (log,) = (tmp_path / "home" / "state" / "logs").glob("crash-*.log")
    assert str(log) in done.err
    assert "in explode" in log.read_text()
    assert "esirprus" not in log.read_text()  # it could be a prompt
    assert log.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_stdout_is_told() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "edgellm", "ls", "--json"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: The disk is full")
    assert "Traceback" not in done.stderr


def test_closed_streams_are_no_error() -> None:
    command = f"{sys.executable} -m edgellm ls >&- 2>&- <&-"
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, check=False).returncode == 0


def test_every_error_of_ours_keeps_its_exit_code(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    def classes(base: type[EdgeError]) -> list[type[EdgeError]]:
        return [base, *(found for child in base.__subclasses__() for found in classes(child))]

    def fail(error: BaseException) -> None:
        raise error

    for kind in classes(EdgeError):
        EdgeError.__init__(error := kind.__new__(kind), "It is wrong.", "Mend it.")  # some have words of their own
        monkeypatch.setattr(model_files, "list_models", lambda _, error=error: fail(error))
        done = edge("ls")
        assert (done.code, done.err) == (kind.exit_code, "error: It is wrong. Mend it.\n")
        assert kind.exit_code in (1, 2, 130)
    monkeypatch.setattr(model_files, "list_models", lambda _: fail(KeyboardInterrupt()))
    assert edge("ls").code == 130


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_reader_that_leaves_is_no_error(words: tuple[str, ...]) -> None:
    process = start_endless("chat", *words, "Hello")
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=120)
    assert not re.search("Traceback|error|BrokenPipe", errors)


def test_ctrl_c_in_a_single_question_is_130() -> None:
    process = start_endless("chat", "--json", "Hello")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert '"finish_reason": "cancelled"' in rest.splitlines()[-1]
    assert "Traceback" not in errors


def test_ctrl_c_while_the_program_is_imported_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(name: str, *_: object) -> None:
        if name == "edgellm.cli.app":
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "edgellm.cli.app")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=stop), *sys.meta_path])
    with pytest.raises(SystemExit, match="130"):
        reload(cli)


def imported(*words: str) -> set[str]:
    """Return the packages of edgellm and of libraries that a command line imports."""
    program = """
        import sys
        from edgellm.cli.app import run
        run(sys.argv[1:])
        print("\\n", *(".".join(m.split(".")[: 2 if m.startswith("edgellm.") else 1]) for m in sys.modules))
    """
    return set(run_python(program, *words).stdout.splitlines()[-1].split())


def test_help_is_quick_because_it_imports_the_command_line_alone() -> None:
    found = imported("--help")
    assert {one for one in found if one.startswith("edgellm.")} == {
        "edgellm.cli", "edgellm.errors", "edgellm.spec", "edgellm.system",
    }  # fmt: skip
    for words in (("chat", "--help"), ("mesh", "run", "--help")):
        assert not imported(*words) & {"llama_cpp", "grpc", "numpy", "huggingface_hub", "prompt_toolkit"}


def test_a_chat_in_this_process_imports_no_network() -> None:
    found = imported("chat", "Where is my mug?", "--max-tokens", "1")
    assert "edgellm.llm" in found
    packages = {"rpc", "services", "mesh", "coldstart", "http", "diagnostics"}
    assert not found & {*(f"edgellm.{one}" for one in packages), "grpc", "cryptography", "zeroconf", "prompt_toolkit"}


def options(context: typer.Context) -> dict[str, str]:
    """The visible options of a command by their parameters' names, each with its long name."""
    given = [one for one in context.command.params if one.param_type_name == "option" and not one.is_eager]
    return {one.name: one.opts[-1] for one in given if not one.hidden}  # type: ignore[attr-defined]


def listed(page: str) -> set[str]:
    names = re.findall(r"^  (?:-\w, )?(--[\w\[\]-]+)", page.partition("\nOptions:")[2], re.MULTILINE)
    return {name.replace("[no-]", "") for name in names} - {"--help", "--help-all"}


@pytest.mark.parametrize("context", [pytest.param(one, id=one.command_path) for one in commands()])
def test_a_short_page_is_short_the_other_has_all_and_all_is_completed(context: typer.Context, edge: Edge) -> None:
    words, known = context.command_path.split()[1:], options(context)
    short, whole = edge(*words, "--help"), edge(*words, "--help-all")
    assert (short.code, whole.code, "]...]" in whole.out) == (0, 0, False)
    assert listed(whole.out) == set(known.values())
    assert len(listed(short.out)) <= SHORT
    assert listed(short.out) <= listed(whole.out)
    assert (f"{context.command_path} --help-all" in short.out) == (len(known) > SHORT)
    assert all(f"  {line}\n" in whole.out for line, _ in pages()[" ".join(words)].examples)
    completed = {one.value for one in context.command.shell_complete(context, "--")}
    assert completed >= {*known.values(), "--help", "--help-all"}


def test_every_option_and_argument_has_its_text_and_no_text_is_left_over() -> None:
    params: list[Any] = [one for context in commands() for one in context.command.params]
    assert [one.name for one in params if not (one.help or one.hidden)] == []
    texts = {text for section in option_texts().values() for text in section.values()}
    assert texts <= {one.help for one in params}


def test_a_group_without_a_command_prints_its_page(edge: Edge) -> None:
    for words in ((), ("mesh",), ("config",)):
        done = edge(*words)
        assert (done.code, done.err) == (2, "")
        assert ("\nCommands:\n" if words else "\nTalk:\n") in done.out
        assert "-h, --help" in done.out
        assert edge(*words, "--help").out == done.out
    page = edge("--help").out
    for name in filter(str.isalpha, pages()):
        assert len(re.findall(rf"^  {name} +\S", page, re.MULTILINE)) == 1


def test_every_option_has_a_variable_of_its_own() -> None:
    options: list[Any] = [option for one in commands() for option in one.command.params]
    variables = [one.envvar[-1] for one in options if one.param_type_name == "option" and not one.is_eager]
    assert len(variables) == len(set(variables))
    assert all(name.replace("_", "").isalnum() and name.isupper() for name in variables)
    assert {"EDGELLM_CHAT_BUDGET", "EDGELLM_MESH_PLAN_TOKENS_OUT", "EDGELLM_CHAT_JSON"} <= set(variables)


FETCH = "Fetch it with: edgellm pull qwen3:8b (5.0 GB, Qwen/Qwen3-8B-GGUF:Q4_K_M)"
GATEWAY = "serve --role verifier --no-http --upstream http://127.0.0.1:9 -m edgellm-draft"
REFUSED = {
    "frob": (2, "edgellm --help"),
    "ls --frob": (2, "edgellm ls --help"),
    "show": (2, "edgellm show --help"),
    "catalog quen": (2, "It has smollm2, qwen3, qwen3.5"),
    # models
    "chat Hello --verifier qwen3:8b": (1, FETCH),
    "run": (2, "No model is named. Name one: edgellm run MODEL PROMPT"),
    "chat none.gguf Hello": (1, "There is no file none.gguf"),
    "run 'Where is my mug?'": (1, "'Where is my mug?' is not a model. To ask the pair that is set up: edgellm chat"),
    "run --think off edgellm-draft": (2, "Name the model first"),
    "run edgellm-verifier Hello --draft none --budgt 1": (2, "No such option: --budgt"),
    # replies
    "chat Hello --draft none --verifier none": (2, "at least one"),
    "chat Hello --gate maybe": (2, "'auto', 'synera', 'confidence'"),
    "chat Hello --profile none.json": (1, "edgellm profile"),
    "chat Hello --context none.txt": (2, "none.txt cannot be read"),
    "chat Hello --gpu-layers some": (2, "Give auto, all or a whole number."),
    "add nofile": (1, "There is no model file at nofile."),
    "history show 90d": (2, "has no meaning"),
    "history off --yes": (2, "--yes has no meaning"),
    # servers
    "serve --announce": (2, "--announce belongs to the roles verifier and worker"),
    "serve --rpc": (2, "--rpc belongs to the role worker"),
    "serve --host 192.0.2.1": (2, "Use --http-host"),
    "serve --role verifier --mesh here:1-12": (2, "--mesh belongs to the role pair"),
    "serve --alias gpt-4o": (2, "--alias is 'gpt-4o'"),
    "serve --http-port 0 --mesh here:1-12,nobody": (2, "is not a part of a split"),
    "serve --no-http": (2, "HTTP only"),
    "serve -m edgellm-draft --verifier edgellm-verifier": (2, "-m and --verifier both name the model"),
    "serve --tls-cert c.pem": (2, "--tls-key"),
    "serve --role verifier --no-http --draft edgellm-draft": (2, "edgellm-draft is no EAGLE-3 head"),
    "serve --role verifier --no-http --verifier-tier score": (2, "--verifier-tier belongs to --upstream"),
    "serve --role verifier --no-http --upstream http://127.0.0.1:9": (2, "needs a model with the server's tokenizer"),
    f"{GATEWAY} --verifier-tier best": (2, "--verifier-tier': 'best' is not one of"),
    f"{GATEWAY} --threads 2": (2, "--threads has no meaning with --upstream"),
    f"{GATEWAY} --draft none": (2, "--draft has no meaning with --upstream"),
    "stop 9": (2, "No HTTP server of yours is running at port 9."),
    "service uninstall": (2, "The service is not installed."),
    # a home of devices
    "mesh plan": (2, "There are no devices to plan for. Give a MODEL"),
    "mesh plan --preset csgo --devices x.toml": (2, "--devices and --preset exclude"),
    "mesh plan --devices none.toml": (2, "There is no file none.toml"),
    "mesh plan nobody/nothing --preset csgo": (1, "edgellm pull nobody/nothing"),
    "mesh plan --preset csgo --tokens-in 2000000": (1, "Choose a smaller model"),
    "mesh plan --preset home": (2, "Choose from csgo"),
    "mesh plan --preset csgo --threads 2": (2, "--threads has no meaning with described devices"),
    "mesh plan --preset csgo --ctx-size 512": (2, "--ctx-size needs a model file"),
    "mesh plan edgellm-verifier --ctx-size 100": (2, "1152 tokens in all do not fit into a context of 100"),
    "mesh plan edgellm-verifier --mlock on": (2, "No such option: --mlock"),
    "mesh deploy edgellm-verifier --split here:1-2,here:3-4": (2, "here is named twice"),
    "mesh deploy edgellm-verifier --split here:1-12 --ctx-size 64": (2, "--ctx-size is for a plan, and --split says"),
    "mesh layers clean": (2, "needs a device"),
    "mesh run --json edgellm-verifier Hi": (2, "--json is before the model"),
    "mesh run edgellm-verifier Hi --split here:6-1": (2, "an invalid range of layers"),
    "mesh run edgellm-verifier Hi --split here:1-12 --devices x.toml": (2, "--split and --devices exclude"),
    "mesh run edgellm-verifier Hi --split here:1-12 --peer somewhere": (2, "is not an address"),
    # pairing
    "pair 127.0.0.1:5": (2, "The code is missing"),
    "pair 127.0.0.1:99999 7-lamp-otter": (2, "Port 99999"),
    "pair --grant ''": (2, "No right is given"),
    "pair --name '\x1b[31m'": (2, "not a valid device name"),
    "peers rm": (2, "needs a device"),
    "peers rm phone now": (2, "takes no value"),
    "peers grant phone": (2, "needs a value"),
    "peers grant phone fly": (2, "There is no right 'fly'"),
    "peers list phone": (2, "takes no device"),
    "peers wake phone": (1, "This machine is in no network with phone"),
    "peers wake phone maybe": (2, "Give on, off, or nothing"),
}


@pytest.mark.usefixtures("phone", "cache")
@pytest.mark.parametrize("line", REFUSED)
def test_it_is_a_line_with_a_next_step(edge: Edge, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a user with a paired device that is never there, and without services."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    before = Peers().path.read_bytes()
    done = edge(*shlex.split(line))
    code, says = REFUSED[line]
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert says in done.err
    assert Peers().path.read_bytes() == before
