"""A whole model over several devices by llama.cpp's RPC, for those whose layers cannot be cut."""
