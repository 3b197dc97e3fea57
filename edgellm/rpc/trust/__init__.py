"""Trust between devices: identities, pairing, paired devices and their rights, mutual TLS."""
