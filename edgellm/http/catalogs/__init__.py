"""The models that requests may name: those of this machine, and those with which paired devices verify."""
