"""Layers and measurements between devices."""
