"""Tools: the calls of models by their families, in JSON or between tags, and the tools of a request."""
