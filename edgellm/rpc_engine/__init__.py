"""A whole model over several devices by llama.cpp's RPC, for models whose layers cannot be cut."""
