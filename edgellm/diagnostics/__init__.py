"""`edgellm doctor`: checks of this device and its network."""
