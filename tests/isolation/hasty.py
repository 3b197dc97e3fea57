"""The process that renders templates, which is ended after about a second of the processor."""

from __future__ import annotations

from edgellm.isolation import template_child
from edgellm.isolation.serving import serve

template_child.SECONDS = -1.0  # and the 2 seconds by which its parent is ahead of the system

if __name__ == "__main__":
    serve(template_child.prepare)
