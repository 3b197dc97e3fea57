"""Who may ask: identities, pairing, paired devices and their rights, mutual TLS."""
