"""Gates, which decide whether a chunk is verified, and the profile that they are fitted from."""
