"""The page's conversations, in the store of the command line: listed, searched, read, written, renamed and removed.

They are more private than the models: an API key, which programs and other people get, does not open them. The page's
own key does, which `edgellm serve` prints in the link to the page.
"""

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi import Path as PathParameter
from pydantic import AwareDatetime, Field

from edgellm.http.middleware import Keys
from edgellm.http.schemas.errors import ApiError
from edgellm.http.schemas.fields import RequestModel
from edgellm.http.schemas.responses import Json
from edgellm.storage.chat_log import MAX_BYTES, Conversation, History

PATH = "/conversations"
_EXCERPT = 40  # characters shown on each side of what was searched for
_MAX_TITLE = 200


Time = Annotated[AwareDatetime, Field(strict=False)]
ConversationId = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{8}$")]
Search = Annotated[str, Query(max_length=200, description="Text that a title or a turn must have.")]


class Turn(RequestModel):
    role: Literal["system", "user", "assistant"]
    content: str = Field(max_length=MAX_BYTES)


class NewName(RequestModel):
    name: str = Field(max_length=_MAX_TITLE, description="The new title; empty: the first question.")


class ConversationIn(RequestModel):
    """A conversation to be stored."""

    turns: list[Turn] = Field(description="As the model read and wrote them, the oldest first.")
    name: str = Field("", max_length=_MAX_TITLE, description="The user's title; empty: the first question.")
    page: str = Field("", max_length=MAX_BYTES, description="What the page keeps beside the turns, in its own form.")
    when: Time | None = Field(None, description="The last addition; by default now.")
    replaces: Time | None = Field(
        None, description="The time of the stored state that this was made from: 409 if it has another one by now."
    )

    def conversation(self, conversation_id: str) -> Conversation:
        now = datetime.now(UTC)
        turns = tuple((turn.role, turn.content) for turn in self.turns)
        return Conversation(conversation_id, min(self.when or now, now), turns, " ".join(self.name.split()), self.page)


def _info(one: Conversation, excerpt: str | None = None) -> Json:
    """Return the list's entry of a conversation. `excerpt` is where the searched text stands in it, if not in the
    title."""
    when = one.when.isoformat()
    return {"id": one.id, "title": one.title[:_MAX_TITLE], "when": when, "turns": len(one.turns), "excerpt": excerpt}


def _check_on(store: History) -> None:
    if not store.on:
        message = "The history is off, so no conversation is stored or read. Turn it on: edgellm history on"
        raise ApiError(409, message, code="history_off")


def _find(store: History, conversation_id: str) -> Conversation:
    _check_on(store)
    if (one := store.get(conversation_id)) is None:
        raise ApiError(404, f"There is no conversation {conversation_id}.", code="conversation_not_found")
    return one


def _save(store: History, one: Conversation, replaces: datetime | None = None) -> Json:
    _check_on(store)
    store.save(one, replaces=replaces)
    return _info(one)


def add_conversations(app: FastAPI, keys: Keys) -> None:
    """Add the routes to `app`. Requests must show the page's key or a phone's; without them every one is refused."""
    store, one_path = History(), PATH + "/{conversation_id}"

    def check_key(request: Request) -> None:
        if not keys.opens_page(request):
            message = "Conversations are opened by the link to the page that `edgellm serve` prints. Open that link."
            raise ApiError(401, message, code="page_key_required")

    def options(summary: str) -> dict[str, Any]:
        return {"tags": ["page"], "dependencies": [Depends(check_key)], "summary": summary}

    @app.get(PATH, **options("List or search conversations"))
    def listed(search: Search = "") -> Json:
        """Return the stored conversations, the newest first; while the history is off, nothing is stored."""
        found = (_match(one, search.strip()) for one in (store.all() if store.on else ()))
        return {"on": store.on, "data": [info for info in found if info is not None]}

    @app.post(PATH, status_code=201, **options("Store a new conversation"))
    def add(body: ConversationIn) -> Json:
        return _save(store, body.conversation(Conversation.new().id))

    @app.get(one_path, **options("One conversation"))
    def read(conversation_id: ConversationId) -> Json:
        one = _find(store, conversation_id)
        turns = [{"role": role, "content": text} for role, text in one.turns]
        return {"id": one.id, "name": one.name, "title": one.title, "when": one.when.isoformat(), "turns": turns,
                "page": one.page}  # fmt: skip

    @app.put(one_path, **options("Store a conversation, over its earlier state"))
    def write(conversation_id: ConversationId, body: ConversationIn) -> Json:
        return _save(store, body.conversation(conversation_id), body.replaces)

    @app.patch(one_path, **options("Rename a conversation"))
    def rename(conversation_id: ConversationId, body: NewName) -> Json:
        one = _find(store, conversation_id)
        return _save(store, replace(one, name=" ".join(body.name.split())), one.when)

    @app.delete(one_path, status_code=204, **options("Remove a conversation, also while the history is off"))
    def remove(conversation_id: ConversationId) -> Response:
        if (one := store.get(conversation_id)) is not None:
            store.remove(one)
        return Response(status_code=204)


def _match(one: Conversation, search: str) -> Json | None:
    """Return the list's entry of a conversation in which `search` is found, whatever its case."""
    wanted = re.compile(re.escape(search), re.IGNORECASE)
    if not search or wanted.search(one.title):
        return _info(one)
    for _role, text in one.turns:
        if hit := wanted.search(text):
            begin, end = max(0, hit.start() - _EXCERPT), hit.end() + _EXCERPT
            shown = " ".join(text[begin:end].split())
            return _info(one, f"{'… ' if begin else ''}{shown}{' …' if end < len(text) else ''}")
    return None
