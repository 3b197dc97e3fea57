"""Everything that a graphics card changes, in one run beside llama.cpp's own server: `python -m bench gpu`."""
