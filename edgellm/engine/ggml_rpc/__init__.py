"""llama.cpp's RPC: a server that computes layers for another process, and that process's devices."""
