"""`edgellm doctor`: what is wrong with this machine and its network."""
