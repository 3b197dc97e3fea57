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
from edgellm.storage.model_files import (
    ALIASES,
    hub_name,
    list_models,
    looks_like_path,
    name_of,
    removable,
    remove,
    resolve,
)

if TYPE_CHECKING:
    from edgellm.storage.hub.pull import DownloadPlan, fetch, plan, pull

__all__ = [
    "ALIASES", "Catalog", "DownloadPlan", "History", "catalog", "fetch", "fingerprint", "hub_name", "list_models",
    "looks_like_path", "name_of", "plan", "pull", "removable", "remove", "resolve",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Return a name of the hub's modules, imported when first used: a question needs none of these names."""
    if name in ("DownloadPlan", "fetch", "plan", "pull"):
        return getattr(import_module("edgellm.storage.hub.pull"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
