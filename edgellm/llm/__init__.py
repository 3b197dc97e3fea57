"""The Python API: a pair of models, and replies from it. The command line is a client of this."""

from edgellm.llm.llm import LLM, generate
from edgellm.llm.messages import compose
from edgellm.llm.model_loading import AUTO, Progress, is_address
from edgellm.llm.pair_stats import find_profile, profile_path, read_profile
from edgellm.storage.model_files import DEFAULT, Named

__all__ = [
    "AUTO", "DEFAULT", "LLM", "Named", "Progress", "compose", "find_profile", "generate", "is_address", "profile_path",
    "read_profile",
]  # fmt: skip
