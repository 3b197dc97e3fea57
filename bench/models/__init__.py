"""Models of every architecture, with random weights: that all features give the verifier's text, and what they take."""
