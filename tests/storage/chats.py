"""The database of past chats, as other programs see it."""

import sqlite3
from contextlib import closing

from edgellm.storage import History
from edgellm.storage.chat_log import ChatLog


def raw(log: ChatLog) -> sqlite3.Connection:
    """Return a connection to the database, without settings of ours."""
    return sqlite3.connect(log.path, isolation_level=None)


def change(log: ChatLog, statement: str, *values: object) -> None:
    """Change the database as no method of ours does."""
    with closing(raw(log)) as db:
        db.execute(statement, values)


def said(history: History) -> list[tuple[str, str]]:
    """Return the questions and replies, the oldest first."""
    return [(past.question, past.reply) for past in history.recent()]
