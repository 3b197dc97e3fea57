"""The HTTP door: OpenAI's API over a pair of models, for programs and for a browser."""
