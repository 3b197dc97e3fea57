"""Stock servers as verifiers: vLLM, SGLang, llama-server, Ollama and whoever speaks OpenAI's completions."""
