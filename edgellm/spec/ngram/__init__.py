"""Drafts from what has been seen: the context, the reply so far, past conversations (CoordGen)."""
