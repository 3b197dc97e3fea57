"""The process that renders templates, which is ended after about a second of the processor."""

from edgellm.isolation import template_sandbox

template_sandbox.SECONDS = -1.0  # and the 2 seconds by which its parent is ahead of the system
functions = template_sandbox.functions
