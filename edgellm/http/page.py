"""The page at `/`: files of the package, and a policy by which it can fetch nothing from anywhere else."""

from __future__ import annotations

from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.responses import Response

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FILES = ("index.html", "page.css", "chat.js", "side.js")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)


def page_file(name: str) -> Response:
    """Return one of the page's files. Raises HTTPException (404) for any other name."""
    if name not in _FILES:
        raise HTTPException(404)
    text = (files("edgellm.http") / "page" / name).read_text(encoding="utf-8")
    kind = _KINDS[name.rpartition(".")[2]]
    return Response(text, media_type=kind, headers={"Content-Security-Policy": _POLICY})
