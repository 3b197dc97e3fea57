"""CoordGen: retrieved drafts, calibration, draft reuse and graph switching."""
