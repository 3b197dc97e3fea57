"""The engine around llama.cpp: decoding, attention, threads, batches and the LM head."""
