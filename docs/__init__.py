"""Documentation, and the script that keeps its outputs true."""
