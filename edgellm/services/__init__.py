"""The gRPC services of verifiers and workers, and their clients."""

import edgellm.rpc  # noqa: F401 - before anything here imports gRPC
