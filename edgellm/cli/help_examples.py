"""Examples for the help pages, and names for shell completion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from edgellm.errors import EdgeError

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ('edgellm chat "What is photosynthesis?"', "ask a question"),
        ("edgellm chat", "start a conversation; /help lists its commands"),
        ("edgellm setup", "get better models that fit this machine"),
        ("edgellm run qwen3:4b", "talk to a model; download it first if it is not here"),
        ("edgellm serve", "serve OpenAI's API and a web page, to this machine only"),
    ),
    "chat": (
        ('edgellm chat "What is photosynthesis?"', "ask a question"),
        ('edgellm chat --context notes.txt "When is the film night?"', "ask about a file, or several; or pipe one in"),
        ('edgellm chat -c "Shorter, please."', "continue the last conversation"),
        ("edgellm chat", "start a conversation; /help lists its commands"),
        ("edgellm chat --draft SMALL.gguf --verifier BIG.gguf", "use models of your own"),
        ("edgellm chat --verifier auto", "use the best verifier among the paired devices"),
        ("edgellm chat --verifier none", "use the draft model alone"),
        ("edgellm chat --draft none", "use the verifier alone"),
        ("edgellm chat --verifier localhost:50151", "use a verifier started by `edgellm serve`"),
        ("edgellm chat --verifier http://gpu-box:8000", "use a vLLM or llama-server that already runs"),
        ("edgellm chat --peer desk", "use the verifier of this paired device"),
        ("edgellm chat --peer 192.168.1.20:50151", "use the verifier at this address"),
        ("edgellm chat --mesh here:1-6,desk:7-12", "split the verifier over two devices; see edgellm mesh run --help"),
        ("edgellm chat --mesh auto", "choose the split over the paired devices automatically"),
        ("edgellm chat --budget 0.2", "verify one chunk in five: those that matter most"),
        ("edgellm chat --budget 0.2 --gate synera --explain", "use the paper's gate, and explain each decision"),
        ("edgellm chat --retrieval off", "copy nothing from the context or past conversations"),
        ("edgellm chat --verifier localhost:50151 --no-parallel", "do not draft while the verifier checks"),
        ('edgellm chat --json "Hello" | jq -r .text', "print one JSON object per token, then a summary"),
    ),
    "setup": (
        ("edgellm setup", "propose a pair, and ask before anything is done"),
        ("edgellm setup --dry-run", "say what would be done, and why"),
        ("edgellm setup --yes --verifier qwen3:4b --at-login", "take this verifier, and serve the pair at every login"),
        ("edgellm setup --dry-run --json | jq -r .verifier.name", "for scripts"),
    ),
    "run": (
        ("edgellm run qwen3:4b", "start a conversation; download the model first if it is not here"),
        ('edgellm run qwen3:4b "Why is the sky blue?"', "ask one question"),
        ("edgellm run qwen3:4b --yes --think off Hello", "ask nothing before the download; an option of edgellm chat"),
        ("edgellm run qwen3:4b --draft none", "have it write alone"),
    ),
    "profile": (
        ("edgellm profile --prompts questions.txt", "profile the default pair on your questions, one per line"),
        (
            "edgellm profile --draft SMALL.gguf --verifier BIG.gguf --prompts chats.jsonl",
            "profile another pair on conversations in JSON Lines",
        ),
        (
            "edgellm profile --verifier localhost:50151 --prompts questions.txt",
            "profile with a verifier that is served",
        ),
    ),
    "ps": (
        ("edgellm ps", "what runs, and what is in memory"),
        ("edgellm ps --json", "the same for a program"),
    ),
    "stop": (
        ("edgellm stop qwen3:4b", "free the memory of a model; it is loaded again when it is asked for"),
        ("edgellm stop 8080", "end the server at this port"),
    ),
    "serve": (
        ("edgellm serve", "serve the default pair over OpenAI's API, to this machine only"),
        (
            "edgellm serve --draft SMALL.gguf --verifier desk:50151 --http-port 8081",
            "serve another pair on another port",
        ),
        (
            "edgellm serve --mesh here:1-6,desk:7-12",
            "split the verifier over two devices; the web page draws their work",
        ),
        ("edgellm serve --plan plan.json", "also draw the plan that `edgellm mesh plan --json > plan.json` wrote"),
        ("edgellm serve --http-host 192.168.1.20", "serve other machines too, over TLS, with a generated API key"),
        ("edgellm serve --role verifier", "serve the default verifier to devices that draft, and over HTTP"),
        ("edgellm serve --role verifier -m user/repo:Q8_0 --port 50152", "serve another verifier on another port"),
        ("edgellm serve --role verifier --host 192.168.1.20", "serve paired devices at this address"),
        ("edgellm serve --role worker --host 192.168.1.20", "compute layers that other devices upload"),
        ("edgellm serve --role worker -m ./big.gguf --port 50152", "compute any layers of a model on this machine"),
    ),
    "service install": (
        ("edgellm service install", "serve the pair of your settings from now on"),
        ("edgellm service install --role verifier --host 192.168.1.20", "verify drafts of paired devices"),
        ("edgellm service install --dry-run", "say what would be installed"),
    ),
    "service uninstall": (
        ("edgellm service uninstall", "stop it, and start it no more at login"),
        ("edgellm service uninstall --json", "for scripts"),
    ),
    "service status": (
        ("edgellm service status", "say whether it runs"),
        ("edgellm service status --json | jq -r .pid", "for scripts"),
    ),
    "service logs": (
        ("edgellm service logs", "print the last 50 lines"),
        ("edgellm service logs -f", "follow the log"),
    ),
    "pair": (
        ("edgellm pair", "show a code, such as 7-lamp-otter, and wait"),
        ("edgellm pair 7-lamp-otter", "on the other device: find the one that shows the code"),
        ("edgellm pair 192.168.1.20:50150 7-lamp-otter", "the same, if it is not found automatically"),
        ("edgellm pair --grant verify,files", "also let the other device copy models from here"),
    ),
    "doctor": (
        ("edgellm doctor", "run all checks"),
        ("edgellm doctor --peer 192.168.1.20:50151", "also check the device at this address"),
        ("edgellm doctor --json | jq -r '.[] | select(.state == \"problem\").what'", "for scripts"),
    ),
    "peers": (
        ("edgellm peers", "list the paired devices, and what they offer"),
        ("edgellm peers grant phone files", "also let it copy models from here"),
        ("edgellm peers revoke phone verify", "stop verifying its drafts here"),
        ("edgellm peers rm phone", "unpair it"),
        ("edgellm peers --json | jq -r '.[] | select(.there).name'", "for scripts"),
    ),
    "catalog": (
        ("edgellm catalog", "list all, with what fits here and what is here"),
        ("edgellm catalog qwen3", "list one family"),
        ("edgellm catalog --json | jq -r '.[] | select(.fits).name'", "for scripts"),
    ),
    "pull": (
        ("edgellm pull qwen3:4b", "download a model of `edgellm catalog`"),
        ("edgellm pull qwen3:4b-q8_0", "the same in another quantisation"),
        ("edgellm pull Qwen/Qwen2.5-7B-Instruct-GGUF", "download Q4_K_M, or the closest that fits into memory"),
        ("edgellm pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:q8_0", "download a certain quantisation"),
        ("HF_TOKEN=hf_... edgellm pull user/private-GGUF", "download a private or gated model"),
    ),
    "ls": (
        ("edgellm ls", "list all models"),
        ("edgellm ls --json | jq -r .[].path", "print their paths"),
    ),
    "show": (
        ("edgellm show smollm2:135m", "show a model of the catalogue that is here"),
        ("edgellm show ./model.gguf", "show a file of your own"),
    ),
    "bench": (
        ("edgellm bench synera --list", "list the parts of a suite"),
        ("edgellm bench synera --quick", "run all parts on few cases, in a few minutes"),
        ("edgellm bench synera quality stalls", "run two parts in full"),
        ("edgellm bench engine rows --gpu-layers all", "run a part on the graphics cards"),
        ("edgellm bench csgo --show", "print the last results without measuring"),
    ),
    "mesh plan": (
        ("edgellm mesh plan user/repo:Q4_K_M", "measure this device and the paired ones, and plan for this model"),
        ("edgellm mesh plan --preset csgo", "plan for the paper's four devices and its model"),
        ("edgellm mesh plan --devices home.toml user/repo:Q4_K_M", "plan for the devices in a file"),
        (
            "edgellm mesh plan --devices home.toml ./big.gguf --objective reply --tokens-out 400",
            "minimise the time to the end of the reply, not to its first token",
        ),
        (
            "edgellm mesh plan --preset csgo --overlap paper --tokens-in 256 --plot plan.png",
            "load and compute in turns, as in the paper; also draw the plan",
        ),
        ("edgellm mesh plan --preset csgo --json | jq -r .advice", "print the advice only"),
    ),
    "mesh peers": (
        ("edgellm mesh peers", "list the devices with their speed and layers"),
        ("edgellm mesh peers --measure user/repo:Q4_K_M", "measure all of them now, with layers like this model's"),
        ("edgellm mesh peers --json | jq -r '.[] | [.name, .speed.disk_mb_s] | @tsv'", "for scripts"),
    ),
    "mesh deploy": (
        ("edgellm mesh deploy user/repo:Q4_K_M", "deploy as `edgellm mesh plan` advises"),
        ("edgellm mesh deploy ./big.gguf --split here:1-12,desk:13-24", "deploy by your own split"),
        ("edgellm mesh deploy ./big.gguf --rate 50", "use at most 50 Mbit/s of the network"),
    ),
    "mesh layers": (
        ("edgellm mesh layers", "list the layers and the free space of each device"),
        ("edgellm mesh layers clean --on desk --model ./big.gguf", "remove one model's layers from one device"),
        ("edgellm mesh layers clean --on here --yes", "remove all layers that are not in use, without asking"),
    ),
    "config path": (
        ("edgellm config path", "print the path of the settings file"),
        ("edgellm config path data", "print the folder of profiles, identity and history"),
    ),
    "config show": (
        ("edgellm config show", "show which options the file and variables set"),
        ("edgellm config show chat --all --origin", "show every option of chat, its value and its origin"),
        ("edgellm config show --json | jq -r .serve", "for scripts"),
    ),
    "mesh run": (
        ("edgellm mesh run MODEL 'Why is the sky blue?'", "choose the best split of the layers that the devices have"),
        ("edgellm mesh run MODEL 'Hello' --peer 127.0.0.1:50151 --explain", "also use this worker; explain the split"),
        (
            "edgellm mesh run MODEL 'Hello' --split here:1-6,desk:7-12",
            "use the worker of a paired device",
        ),
        (
            "edgellm mesh run MODEL 'Hello' --split 127.0.0.1:50151:1-6,127.0.0.1:50152:7-12",
            "use two workers on this machine",
        ),
        (
            "edgellm mesh run MODEL 'Hello' --devices home.toml --peer desk=192.168.1.20:50151",
            "plan for a devices file",
        ),
        (
            "edgellm mesh run MODEL 'Hello' --split here:1-6,desk:7-12 --draft SMALL",
            "draft here, and verify chunks on the mesh",
        ),
    ),
    "rm": (
        ("edgellm rm user/repo:Q8_0", "remove one quantisation"),
        ("edgellm rm user/repo --yes", "remove all of a repository, without asking"),
    ),
    "conversations": (
        ("edgellm conversations", "list all, newest first"),
        ("edgellm conversations show 3f2a", "show one; the first characters of its ID are enough"),
        ("edgellm conversations rm 3f2a --yes", "remove one; --all removes all"),
        ("edgellm conversations --json | jq -r .[0].id", "for scripts"),
    ),
    "history": (
        ("edgellm history", "show how much is kept, and since when"),
        ("edgellm history clear", "delete it; --yes does not ask"),
        ("edgellm history off", "stop keeping and reading it; `on` undoes this"),
        ("edgellm history path", "print where it is kept"),
    ),
}


FLEET_FILE = """A devices file is TOML, with a table for each device:

  [[device]]
  name = "desktop"
  tflops = 20         # peak
  util_a = 0.4        # share of the peak that is reached: a (1 - e^(-b tokens))
  util_b = 0.001
  disk_mb_s = 2000
  memory_gb = 16      # for the model
  uplink_mbps = 400   # to the access point
  downlink_mbps = 500
  latency_ms = 2      # per message, on its side; optional
  memory_gb_s = 50    # of reading weights to decode; optional

A [[link]] table with from, to, mbps and latency_ms has the measured link between two devices.
Without a MODEL, a [model] table must have layers, d_model, heads, kv_heads, d_head, d_ff, bytes_per_weight."""


GATES = {
    "auto": "the one with the best evidence in the pair's profile",
    "synera": "the paper's gate: confidence, then importance",
    "confidence": "chunks of low confidence",
    "importance": "chunks that later tokens attend to",
    "random": "chunks at random",
    "always": "every chunk",
    "never": "no chunk",
}


def gate_names(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the gates for shell completion, each with what it verifies."""
    for name, meaning in GATES.items():
        if name.startswith(incomplete.lower()):
            yield name, meaning


SOURCES = {
    "context": "the prompt and the reply so far",
    "history": "past conversations, verbatim",
    "analogy": "the reply to a similar prompt, with its names replaced",
    "calibration": "the model's predictions while it read the prompt",
    "reuse": "the rest of a rejected draft",
}


def source_names(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the sources of drafts for shell completion of the last one typed."""
    *before, last = incomplete.split(",")
    choices = SOURCES if before else {"auto": "all sources that pay off", "off": "none", **SOURCES}
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


def catalog_names(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the models of the catalogue for shell completion, with their sizes."""
    from edgellm.cli.views.console import size
    from edgellm.storage import catalog

    for model in catalog().models.values():
        if model.name.startswith(incomplete.lower()):
            yield model.name, f"{model.title}, {size(model.size)}"
