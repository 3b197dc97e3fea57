"""The exact planner for many devices and layers."""
