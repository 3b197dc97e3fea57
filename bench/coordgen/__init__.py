"""CoordGen: retrieved drafts, calibration, draft reuse and graph switching."""

import edgellm.engine  # noqa: F401  before the classes of llama-cpp-python, for which it loads llama.cpp
