"""Gates: which drafted chunks are worth the verifier's time, at what budget, and the profile that says so."""
