"""The kinds of stock servers that are replayed."""

from collections.abc import Callable, Mapping

from testkit.upstream.dialects import Dialect, LlamaServer, Sglang, Vllm
from testkit.upstream.engine import Engine
from testkit.upstream.text_dialects import LlamaCppPython, LmStudio, MlxLm, Ollama, Tabby

KINDS: Mapping[str, Callable[[Engine], Dialect]] = {
    "vllm-score": lambda engine: Vllm(engine, scores=True, counts=True, most=64),
    "vllm-fan-out": lambda engine: Vllm(engine, counts=True, most=64),
    "sglang": Sglang,
    "llama-server": LlamaServer,
    "llama-cpp-python": LlamaCppPython,
    "ollama": Ollama,
    "lm-studio": LmStudio,
    "tabbyapi": Tabby,
    "mlx-lm": MlxLm,
}
POSITIONS = 1024
