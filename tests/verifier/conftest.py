"""The engine runs over the same endless verifier as the services do."""

from tests.services.conftest import alone, exact, prompt, server

__all__ = ["alone", "exact", "prompt", "server"]
