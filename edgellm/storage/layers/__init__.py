"""The store of layers: pieces, manifests, owners, room."""
