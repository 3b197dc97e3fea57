"""Everything stored on disk: models and their names, downloads and removal, layers, and past conversations.

The package uses no network but the model hub's.
"""

import os

# Read when the hub's library is first imported: with telemetry on, it asks the hub for a list of agents before every
# request, and reads the answer without a limit.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
