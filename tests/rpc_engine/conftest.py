"""A paired device's trust."""

from tests.rpc.conftest import host

__all__ = ["host"]
