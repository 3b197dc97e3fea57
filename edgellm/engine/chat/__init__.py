"""Conversations: their messages, the chat template that writes them as a text, and the tokens of that text."""
