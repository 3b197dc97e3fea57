"""Stock servers as verifiers: vLLM, SGLang, llama-server, Ollama and servers of OpenAI's completions."""
