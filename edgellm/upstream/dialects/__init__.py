"""The kinds of stock servers, a module each. `connect` there returns the server if it is of that kind, else None."""

DIALECTS = (
    "vllm",
    "sglang",
    "llama_server",
    "ollama",
    "by_text",
    "completions",
)
"""The modules in the order in which they are asked."""
