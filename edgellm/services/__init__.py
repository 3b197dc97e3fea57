"""The verifier in a process of its own, and the device's way to it."""

import edgellm.rpc  # noqa: F401 - before anything here imports gRPC
