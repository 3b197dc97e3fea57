"""The store of layers: pieces, manifests and owners."""
