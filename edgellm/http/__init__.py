"""The HTTP server: OpenAI's API over a pair of models, for programs, and a page for browsers."""
