"""Progressive graph scheduling (CoordGen, 3.2)."""
