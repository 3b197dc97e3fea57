"""Which device gets which layers."""
