"""Decoding algorithms: drafts, gates, verification, the loop. Knows no socket, no screen and no llama.cpp."""
