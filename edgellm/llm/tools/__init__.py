"""Tools: the formats of calls by families of models, and the calls of a reply told apart from its text.

The family is known by its chat template, which also describes the tools to the model. A model whose template has no
tools gets a system message instead, with the format of most families; that works with any model that follows
instructions, and clients need not know the difference.
"""

from edgellm.llm.tools.formats import find_format
from edgellm.llm.tools.stream import split_calls
from edgellm.llm.tools.toolbox import Toolbox

__all__ = ["Toolbox", "find_format", "split_calls"]
