"""Replies in phases: another placement is loaded behind a reply, and takes over between two of its tokens."""
