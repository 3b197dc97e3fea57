"""Tools: how each family of models writes its calls, and the calls of a reply told apart from its text.

The family is known by its chat template, which also describes the tools to the model. A model whose template has no
tools gets them in a system message instead, with the format that most families use; that works with any model that
follows instructions, and clients need not know which does.
"""

from edgellm.llm.tools.formats import find_format
from edgellm.llm.tools.stream import split_calls
from edgellm.llm.tools.toolbox import Toolbox

__all__ = ["Toolbox", "find_format", "split_calls"]
