"""`python -m tests.cli.endless ...` is `edgellm ...` with a model that never ends a reply."""

from edgellm import llm
from edgellm.cli import main
from tests.http.test_streaming import endless, scripted

if __name__ == "__main__":
    llm.LLM.reply = lambda *_, **__: scripted(endless)  # type: ignore[method-assign]
    main()
