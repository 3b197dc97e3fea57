"""Past chats for tests."""

from edgellm.storage.chat_log import Conversation, History


def keep(history: History, question: str, reply: str = "r") -> None:
    """Keep a conversation of one question."""
    history.save(Conversation.new().with_turns([("user", question), ("assistant", reply)]))
