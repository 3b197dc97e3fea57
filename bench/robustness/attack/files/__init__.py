"""Attacks by files: models, templates, texts, a hub, and edgellm's own files when they are damaged."""
