"""The database of past chats, as other programs see it."""

import sqlite3
from contextlib import closing

from edgellm.storage import History
from edgellm.storage.chat_log import Conversation


def raw(log: History) -> sqlite3.Connection:
    """Return a connection to the database, without settings of ours."""
    return sqlite3.connect(log.path, isolation_level=None)


def change(log: History, statement: str, *values: object) -> None:
    """Change the database as no method of ours does."""
    with closing(raw(log)) as db:
        db.execute(statement, values)


def keep(history: History, question: str, reply: str = "r") -> None:
    """Keep a conversation of one question."""
    history.save(Conversation.new().with_turns([("user", question), ("assistant", reply)]))
