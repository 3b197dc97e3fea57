"""The engine around llama.cpp: decoding, attention, threads, batches and the LM head."""

import edgellm.engine  # noqa: F401  before the classes of llama-cpp-python, for which it loads llama.cpp
