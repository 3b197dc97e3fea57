"""How two devices talk: the contract (`edgellm.proto`), addresses, channels."""

import os

# gRPC's core writes to stderr when a connection ends; only the command line may. It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
