"""What cannot be meant, or cannot work, is one line with a next step, and nothing is done."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from edgellm.rpc.trust.trust import Peers
from tests.cli.conftest import Edge

FETCH = "Fetch it with: edgellm pull qwen3:8b (5.0 GB, Qwen/Qwen3-8B-GGUF:Q4_K_M)"
TRAINED = "was trained for 1024. Give a --ctx-size"
REFUSED = {
    "frob": (2, "edgellm --help"),
    "ls --frob": (2, "edgellm ls --help"),
    "show": (2, "edgellm show --help"),
    "catalog quen": (2, "It has smollm2, qwen3, qwen3.5"),
    # models
    "chat Hello -m none.gguf": (1, "There is no file none.gguf"),
    "chat Hello -m ann/none:Q8_0": (1, "edgellm pull ann/none:Q8_0"),
    "chat Hello -m edgellm-drafd": (1, "Did you mean edgellm-draft?"),
    "chat Hello -m a/b/c": (2, "is not a model name"),
    "chat Hello --verifier qwen3:8b": (1, FETCH),
    "profile --verifier qwen3:8b --prompts README.md": (1, FETCH),
    "run": (2, "No model is named. Name one: edgellm run MODEL PROMPT"),
    "chat none.gguf Hello": (1, "There is no file none.gguf"),
    "chat qwen3:8b Hello": (1, FETCH),
    "run 'Where is my mug?'": (1, "'Where is my mug?' is not a model. To ask the pair that is set up: edgellm chat"),
    "run --think off edgellm-draft": (2, "Name the model first"),
    "run ./none.gguf Hello": (1, "There is no file ./none.gguf"),
    "run edgellm-verifier Hello --draft none --budgt 1": (2, "No such option: --budgt"),
    # replies
    "chat Hello --verifier 127.0.0.1:9": (1, "127.0.0.1:9"),
    "chat Hello --draft none --verifier none": (2, "at least one"),
    "chat Hello --max-tokens many": (2, "--max-tokens"),
    "chat Hello --temperature -1": (2, "temperature is -1"),
    "chat Hello --gate maybe": (2, "'auto', 'synera', 'confidence'"),
    "chat Hello --profile none.json": (1, "edgellm profile"),
    "chat Hello --context none.txt": (2, "none.txt cannot be read"),
    "chat Hello --frobnicate": (2, "--frobnicate"),
    "chat Hello --ctx-size 999999": (2, TRAINED),
    "chat Hello -c": (2, "no conversation to continue"),
    "history show 90d": (2, "has no meaning"),
    "history off --yes": (2, "--yes has no meaning"),
    "history keep 90": (2, "is not an age"),
    # servers
    "serve --announce": (2, "--announce belongs to the roles verifier and worker"),
    "serve --rpc": (2, "--rpc belongs to the role worker"),
    "serve --host 192.0.2.1": (2, "Use --http-host"),
    "serve --sessions 2": (2, "--sessions belongs to the role verifier"),
    "serve --role verifier --mesh here:1-12": (2, "--mesh belongs to the role pair"),
    "serve --alias gpt-4o": (2, "--alias is 'gpt-4o'"),
    "serve --role worker --draft none": (2, "--draft belongs to the roles pair and verifier"),
    "serve --http-port 0 --mesh here:1-12,nobody": (2, "is not a part of a split"),
    "serve --no-http": (2, "HTTP only"),
    "serve -m edgellm-draft --verifier edgellm-verifier": (2, "-m and --verifier both name the model"),
    "serve --http-port 0 --replies 0": (2, "replies is 0"),
    "serve --tls-cert c.pem": (2, "--tls-key"),
    "serve --role verifier --no-http --port 70000": (2, "70000"),
    "serve --role verifier --no-http --draft edgellm-draft": (2, "edgellm-draft is no EAGLE-3 head"),
    "serve --role verifier --no-http --sessions 0": (2, "--sessions"),
    "serve --role verifier --no-http --port 0 --ctx-size 999999": (2, TRAINED),
    "serve --role verifier --no-http --upstream http://127.0.0.1:9 -m edgellm-draft --sessions 2": (2, "no meaning"),
    "stop 9": (2, "No server of yours is running at port 9."),
    "service uninstall": (2, "The service is not installed."),
    # a home of devices
    "mesh plan": (2, "There are no devices to plan for. Give a MODEL"),
    "mesh plan --preset csgo --devices x.toml": (2, "--devices and --preset exclude"),
    "mesh plan --devices none.toml": (2, "There is no file none.toml"),
    "mesh plan nobody/nothing --preset csgo": (1, "edgellm pull nobody/nothing"),
    "mesh plan --preset csgo --tokens-in 0": (2, "--tokens-in"),
    "mesh plan --preset csgo --tokens-in 2000000": (1, "Choose a smaller model"),
    "mesh plan --preset csgo --overlap some": (2, "--overlap"),
    "mesh plan --preset csgo --threads 2": (2, "--threads has no meaning with described devices"),
    "mesh plan --preset csgo --ctx-size 512": (2, "--ctx-size needs a model file"),
    "mesh plan edgellm-verifier --ctx-size 100": (2, "1152 tokens in all do not fit into a context of 100"),
    "mesh plan edgellm-verifier --engine stages --batch-size 8": (2, "--batch-size does not change a plan"),
    "mesh plan edgellm-verifier --mlock on": (2, "--mlock does not change a plan: give it to edgellm mesh run"),
    "mesh plan edgellm-verifier --threads draft=2": (2, "--threads draft=2 is for a draft model"),
    "mesh deploy edgellm-verifier --split desk": (2, "'desk' is not a part of a split"),
    "mesh deploy edgellm-verifier --split here:11-13": (2, "Its layers run from 1 to 12"),
    "mesh deploy edgellm-verifier --split here:1-2,here:3-4": (2, "here is named twice"),
    "mesh deploy edgellm-verifier --split 192.0.2.1:50151:1-2": (1, "is not a loopback address"),
    "mesh deploy edgellm-verifier --split here:1-12 --ctx-size 64": (2, "--ctx-size is for a plan, and --split says"),
    "mesh deploy edgellm-verifier --batch-size 8": (2, "--batch-size does not change which layers a device needs"),
    "mesh layers clean": (2, "needs a device"),
    "mesh run edgellm-verifier Hi --split here:1-6": (1, "ends with layer 6, but the model has 12"),
    "mesh run edgellm-verifier Hi --split here:6-1": (2, "an invalid range of layers"),
    "mesh run edgellm-verifier Hi --split here:1-12 --devices x.toml": (2, "--split and --devices exclude"),
    "mesh run edgellm-verifier Hi --split here:1-12 --peer somewhere": (2, "is not an address"),
    # pairing
    "pair 127.0.0.1:5": (2, "The code is missing"),
    "pair 127.0.0.1:99999 7-lamp-otter": (2, "Port 99999"),
    "pair 127.0.0.1:1 7-lamp-otter": (1, "No device is waiting at 127.0.0.1:1"),
    "pair --grant everything": (2, "There is no right 'everything'"),
    "pair --grant ''": (2, "No right is given"),
    "pair --name '\x1b[31m'": (2, "not a valid device name"),
    "pair --interface nothing0": (2, "There is no interface 'nothing0'"),
    "peers rm": (2, "needs a device"),
    "peers rm attic": (1, "No paired device is called 'attic'. Paired devices: phone"),
    "peers rm phone now": (2, "takes no value"),
    "peers grant phone": (2, "needs a value"),
    "peers grant phone fly": (2, "There is no right 'fly'"),
    "peers rename phone ''": (2, "not a valid device name"),
    "peers list phone": (2, "takes no device"),
    "peers wake phone": (1, "This machine is in no network with phone"),
    "peers wake phone maybe": (2, "Give on, off, or nothing"),
}


@pytest.mark.usefixtures("phone", "cache")
@pytest.mark.parametrize("line", REFUSED)
def test_it_is_one_line_with_a_next_step(
    edge: Edge, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a user with a paired device that is never there, and without services."""
    monkeypatch.setenv("EDGELLM_INTERFACE", "127.0.0.1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    before = Peers().path.read_bytes()
    done = edge(*shlex.split(line))
    code, says = REFUSED[line]
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert says in done.err
    assert Peers().path.read_bytes() == before
