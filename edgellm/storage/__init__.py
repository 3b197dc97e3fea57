"""Everything stored on disk: models and their names, downloads and removal, layers, and past conversations.

The package uses no network but the model hub's.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

# Read when the hub's library is first imported: with telemetry on, it asks the hub for a list of agents before every
# request, and reads the answer without a limit.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from edgellm.storage.catalog import Catalog, catalog
from edgellm.storage.chat_log import History
from edgellm.storage.fingerprint import fingerprint
from edgellm.storage.model_files import ALIASES, hub_name, list_models, looks_like_path, name_of, resolve

if TYPE_CHECKING:
    from edgellm.storage.hub.pull import DownloadPlan, fetch, plan, pull
    from edgellm.storage.upkeep import add, removable, remove

__all__ = [
    "ALIASES", "Catalog", "DownloadPlan", "History", "add", "catalog", "fetch", "fingerprint", "hub_name",
    "list_models", "looks_like_path", "name_of", "plan", "pull", "removable", "remove", "resolve",
]  # fmt: skip
_LATER = {
    "edgellm.storage.hub.pull": ("DownloadPlan", "fetch", "plan", "pull"),
    "edgellm.storage.upkeep": ("add", "removable", "remove"),
}


def __getattr__(name: str) -> object:
    """Return a name of a module that is imported when first used: a question needs none of these names."""
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
