"""The Python API: a pair of models, and replies from it. The command line is a client of this."""

from edgellm.api.compose import compose
from edgellm.api.loading import AUTO, DRAFT, VERIFIER, Named, Progress, check_vocabularies, is_address
from edgellm.api.pair import Pair, generate
from edgellm.api.profiles import find_profile, profile_path, read_profile

__all__ = [
    "AUTO", "DRAFT", "VERIFIER", "Named", "Pair", "Progress", "check_vocabularies", "compose", "find_profile",
    "generate", "is_address", "profile_path", "read_profile",
]  # fmt: skip
