"""The bundled pair: a small made-up home, its people and things, and the tasks in it."""
