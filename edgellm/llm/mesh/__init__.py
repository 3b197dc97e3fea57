"""A model over several devices, as users see it."""
