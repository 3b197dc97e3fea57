"""Communication between devices: the contract (`edgellm.proto`), addresses, channels."""

import os

# gRPC's core writes to stderr when a connection ends, which only the command line may do. It reads this variable when
# it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

DEFAULT_PORT = 50151
PAIRING_PORT = 50150
