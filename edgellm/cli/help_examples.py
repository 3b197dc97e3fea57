"""Help that teaches by example, and names that complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from rich.markup import escape

from edgellm.errors import EdgeError

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "chat": (
        ('edgellm chat "Where is my mug?"', "one question, one reply"),
        ("edgellm chat", "a conversation; /help inside it"),
        ('edgellm chat -c "And my keys?"', "goes on with the last conversation"),
        ('cat notes.txt | edgellm chat "Where is my mug?"', "the notes as context"),
        ('edgellm chat --context a.txt --context b.txt "When is the party?"', "several files"),
        ("edgellm chat --verifier none", "the draft model alone"),
        ("edgellm chat --draft none", "the verifier alone"),
        ("edgellm chat --verifier localhost:50151", "a verifier started by `edgellm serve`"),
        ("edgellm chat --verifier auto", "the best verifier among the paired devices"),
        ("edgellm chat --peer desk", "a certain one, by its name in `edgellm peers`"),
        ("edgellm chat --peer 192.168.1.20:50151", "or by where it is"),
        ("edgellm chat --mesh here:1-6,desk:7-12", "the verifier's layers on two devices; see edgellm mesh run --help"),
        ("edgellm chat --mesh auto", "wherever they are best among the paired devices"),
        ("edgellm chat --budget 0.2", "only one chunk in five is verified: those that matter most"),
        ("edgellm chat --budget 0.2 --gate synera --explain", "by the paper's gate; and why each chunk was or was not"),
        ("edgellm chat --retrieval off", "nothing copied from the context or from past conversations"),
        ("edgellm chat --verifier localhost:50151 --no-parallel", "without drafting on while the verifier checks"),
        ('edgellm chat --json "Hello" | jq -r .text', "one JSON object a token, then a summary"),
    ),
    "profile": (
        ("edgellm profile --prompts questions.txt", "the bundled pair, on questions of yours, one a line"),
        (
            "edgellm profile --draft SMALL.gguf --verifier BIG.gguf --prompts chats.jsonl",
            "conversations, as JSON lines",
        ),
        ("edgellm profile --verifier localhost:50151 --prompts questions.txt", "with a verifier that is being served"),
    ),
    "serve": (
        ("edgellm serve", "OpenAI's API over the bundled pair, on this machine only"),
        ("edgellm serve --draft SMALL.gguf --verifier desk:50151 --http-port 8081", "another pair, another port"),
        ("edgellm serve --mesh here:1-6,desk:7-12", "the verifier on two devices; the page draws what each did"),
        ("edgellm serve --plan plan.json", "the page also draws what `edgellm mesh plan --json > plan.json` has found"),
        ("edgellm serve --http-host 192.168.1.20", "for other machines: by TLS, with a key that is made for you"),
        ("edgellm serve --role verifier", "the bundled verifier, for devices that draft; over HTTP, too"),
        ("edgellm serve --role verifier -m user/repo:Q8_0 --port 50152", "another model, another port"),
        ("edgellm serve --role verifier --host 192.168.1.20", "for paired devices, on this address of the machine"),
        ("edgellm serve --role worker --host 192.168.1.20", "computes the layers that others have brought here"),
        ("edgellm serve --role worker -m ./big.gguf --port 50152", "any layers of a model that is here"),
    ),
    "pair": (
        ("edgellm pair", "shows a code, such as 7-lamp-otter, and waits"),
        ("edgellm pair 7-lamp-otter", "on the other device: finds the one that shows it"),
        ("edgellm pair 192.168.1.20:50150 7-lamp-otter", "the same where it is not found by itself"),
        ("edgellm pair --grant verify,files", "the other device may also copy models from here"),
    ),
    "doctor": (
        ("edgellm doctor", "everything that can be looked at from here"),
        ("edgellm doctor --peer 192.168.1.20:50151", "also a device that should be there"),
        ("edgellm doctor --json | jq -r '.[] | select(.state == \"problem\").what'", "for scripts"),
    ),
    "peers": (
        ("edgellm peers", "who is paired, who is there, and what they offer"),
        ("edgellm peers grant phone files", "let it copy models from here, too"),
        ("edgellm peers revoke phone verify", "no longer have its drafts verified here"),
        ("edgellm peers rm phone", "a stranger again"),
        ("edgellm peers --json | jq -r '.[] | select(.there).name'", "for scripts"),
    ),
    "pull": (
        ("edgellm pull Qwen/Qwen2.5-0.5B-Instruct-GGUF", "the Q4_K_M file, or the nearest there is"),
        ("edgellm pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:q8_0", "a quantisation of your choice"),
        ("HF_TOKEN=hf_... edgellm pull user/private-GGUF", "a private or gated model"),
    ),
    "ls": (
        ("edgellm ls", "every model that is here"),
        ("edgellm ls --json | jq -r .[].path", "where they lie"),
    ),
    "show": (
        ("edgellm show edgellm-verifier", "one of the bundled pair"),
        ("edgellm show ./model.gguf", "a file of your own"),
    ),
    "bench": (
        ("edgellm bench synera --list", "what there is to measure"),
        ("edgellm bench synera --quick", "all of it on few cases, in some minutes"),
        ("edgellm bench synera quality stalls", "two parts of it, in full"),
        ("edgellm bench csgo --show", "the last results for cold starts, without measuring"),
    ),
    "mesh plan": (
        ("edgellm mesh plan user/repo:Q4_K_M", "this device and the paired ones, measured, for a model that is here"),
        ("edgellm mesh plan --preset csgo", "the paper's four devices and its model"),
        ("edgellm mesh plan --devices home.toml user/repo:Q4_K_M", "your devices, and a model that is here"),
        (
            "edgellm mesh plan --devices home.toml ./big.gguf --objective reply --tokens-out 400",
            "so that the whole reply is over soonest, not only its first token there",
        ),
        ("edgellm mesh plan --preset csgo --overlap paper --tokens-in 256 --plot plan.png", "as in the paper; drawn"),
        ("edgellm mesh plan --preset csgo --json | jq -r .advice", "what to do, in a sentence"),
    ),
    "mesh peers": (
        ("edgellm mesh peers", "who is there, what they can do, and which layers they have"),
        ("edgellm mesh peers --measure user/repo:Q4_K_M", "measured now, for layers of this model's shape"),
        ("edgellm mesh peers --json | jq -r '.[] | [.name, .speed.disk_mb_s] | @tsv'", "for scripts"),
    ),
    "mesh deploy": (
        ("edgellm mesh deploy user/repo:Q4_K_M", "as `edgellm mesh plan` says"),
        ("edgellm mesh deploy ./big.gguf --split here:1-12,desk:13-24", "as you say"),
        ("edgellm mesh deploy ./big.gguf --rate 50", "leaving the network to others"),
    ),
    "mesh layers": (
        ("edgellm mesh layers", "what is where, and how much room is left"),
        ("edgellm mesh layers clean --on desk --model ./big.gguf", "one model's layers on one device"),
        ("edgellm mesh layers clean --on here --yes", "all that is not in use, without asking"),
    ),
    "config path": (
        ("edgellm config path", "where the file of settings is, or would be"),
        ("edgellm config path data", "where profiles, identity and history are"),
    ),
    "config show": (
        ("edgellm config show", "what is set, by the file or by a variable"),
        ("edgellm config show chat --all --origin", "every option of chat, its value and where that is from"),
        ("edgellm config show --json | jq -r .serve", "for scripts"),
    ),
    "mesh run": (
        ("edgellm mesh run MODEL 'Where is my mug?'", "over the paired devices, wherever is best of what they hold"),
        ("edgellm mesh run MODEL 'Hello' --peer 127.0.0.1:50151 --explain", "also this worker; and why so"),
        ("edgellm mesh run MODEL 'Where is my mug?' --split here:1-6,desk:7-12", "desk: a paired device with a worker"),
        (
            "edgellm mesh run MODEL 'Hello' --split 127.0.0.1:50151:1-6,127.0.0.1:50152:7-12",
            "two workers on this machine",
        ),
        ("edgellm mesh run MODEL 'Hello' --devices home.toml --peer desk=192.168.1.20:50151", "as a plan says"),
        (
            "edgellm mesh run MODEL 'Hello' --split here:1-6,desk:7-12 --draft SMALL",
            "drafts cross the devices in blocks",
        ),
    ),
    "rm": (
        ("edgellm rm user/repo:Q8_0", "one quantisation"),
        ("edgellm rm user/repo --yes", "all of a repository, without asking"),
    ),
    "conversations": (
        ("edgellm conversations", "all of them, the newest first"),
        ("edgellm conversations show 3f2a", "what was said; the beginning of an ID will do"),
        ("edgellm conversations rm 3f2a --yes", "forget one; --all forgets every one"),
        ("edgellm conversations --json | jq -r .[0].id", "for scripts"),
    ),
    "history": (
        ("edgellm history", "how many conversations are kept, and since when"),
        ("edgellm history clear", "forget them all; --yes does it without asking"),
        ("edgellm history off", "keep and read nothing from now on; `on` takes it back"),
        ("edgellm history path", "where they lie: a file with one JSON object a line"),
    ),
}


FLEET_FILE = """A file of devices is TOML, with a table for each device:

  [[device]]
  name = "desktop"
  tflops = 20         # peak
  util_a = 0.4        # of which a (1 - e^(-b tokens)) is reached
  util_b = 0.001
  disk_mb_s = 2000
  memory_gb = 16      # for the model
  uplink_mbps = 400   # to the access point
  downlink_mbps = 500
  latency_ms = 2      # of a message on its side; may be left out
  memory_gb_s = 50    # how fast weights are read to decode; if left out, the utilisation at one token says it

A measured link between two of them takes the place of what their rates say: [[link]] with from, to, mbps and
latency_ms. Where no MODEL is named: [model] with layers, d_model, heads, kv_heads, d_head, d_ff and
bytes_per_weight."""


def taught(command: str, summary: str, more: str = "") -> str:
    """Return a help text in Rich markup: what the command does, examples, then `more`."""
    lines = [f"  [cyan not dim]{escape(line)}[/]\n      {escape(what)}" for line, what in EXAMPLES[command]]
    examples = "\n".join(["For example:", *lines])
    return "\n\n".join(part for part in (summary, examples, escape(more)) if part)


GATES = {
    "auto": "the one for which the pair's profile has the best evidence",
    "synera": "the paper's: confidence, then importance",
    "confidence": "the unsure chunks",
    "importance": "the chunks that later tokens look at",
    "random": "any chunk, by chance",
    "hybrid": "every unsure token by itself",
    "edgefm": "whole replies, written anew",
    "always": "every chunk",
    "never": "none",
}


def gate_names(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the gates for shell completion, with what each of them verifies."""
    for name, meaning in GATES.items():
        if name.startswith(incomplete.lower()):
            yield name, meaning


SOURCES = {
    "context": "the prompt and the reply so far",
    "history": "past conversations, word by word",
    "analogy": "the reply to a similar prompt, with this one's names in it",
    "calibration": "what the model expected while it read the prompt",
    "reuse": "the rest of a rejected draft",
}


def source_names(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the sources of drafts for shell completion; the last of those already typed is completed."""
    *before, last = incomplete.split(",")
    choices = SOURCES if before else {"auto": "from all that pay", "off": "from none", **SOURCES}
    for name, meaning in choices.items():
        if name.startswith(last.lower()) and name not in before:
            yield ",".join([*before, name]), meaning


def model_names(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the models on this machine for shell completion, with their sizes."""
    from edgellm.cli.views.console import size
    from edgellm.storage import list_models

    with suppress(OSError, EdgeError):
        for model in list_models():
            if model.name.lower().startswith(incomplete.lower()):
                yield model.name, f"{model.origin}, {size(model.size)}"
