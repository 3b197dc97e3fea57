"""Past chats for tests."""

from edgellm.storage import History
from edgellm.storage.chat_log import Conversation


def keep(history: History, question: str, reply: str = "r") -> None:
    """Keep a conversation of one question."""
    history.save(Conversation.new().with_turns([("user", question), ("assistant", reply)]))
