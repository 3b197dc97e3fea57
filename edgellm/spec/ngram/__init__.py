"""Drafts from known texts: the context, the reply so far, past conversations (CoordGen)."""
