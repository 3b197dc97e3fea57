"""What devices and lines of a home can do, measured."""
