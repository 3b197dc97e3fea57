"""The exchange is bound to both certificates twice over, and either binding alone finds a swapped one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from spake2 import SPAKE2_A, SPAKE2_B

from edgellm.errors import PairingFailed
from edgellm.link import pake
from edgellm.link.code import Code
from edgellm.link.identity import Certificate, Identity
from edgellm.link.pake import Exchange

CODE = Code(7, ("lamp", "otter"))


def without_the_transcript(patch: pytest.MonkeyPatch) -> None:
    same = SimpleNamespace(digest=lambda: bytes(32))
    patch.setattr(pake, "hashlib", SimpleNamespace(sha256=lambda _data: same))


def without_spakes_identities(patch: pytest.MonkeyPatch) -> None:
    blind = property(lambda _self: b"", lambda _self, _value: None)
    for name, side in (("SPAKE2_A", SPAKE2_A), ("SPAKE2_B", SPAKE2_B)):
        patch.setattr(pake, name, type(name, (side,), {"idA": blind, "idB": blind}))


def said(one: Exchange, other: Exchange, sees: tuple[Certificate, Certificate]) -> bytes:
    """What `other` hears of `one`, each having seen the certificate that it `sees` for the other's."""
    one.agree(sees[0], other.spake)
    other.agree(sees[1], one.spake)
    return other.check(*one.confirm(b"words"))


@pytest.mark.parametrize("without", [without_the_transcript, without_spakes_identities])
@pytest.mark.parametrize("swapped", [0, 1])
def test_either_binding_finds_a_swapped_certificate(
    monkeypatch: pytest.MonkeyPatch, without: Callable[[pytest.MonkeyPatch], None], swapped: int
) -> None:
    without(monkeypatch)
    desk, phone, mallory = (Identity.new().certificate for _ in range(3))
    right = (desk, phone)
    assert said(Exchange("A", CODE, phone), Exchange("B", CODE, desk), right) == b"words"
    wrong = (mallory, phone) if swapped == 0 else (desk, mallory)
    with pytest.raises(PairingFailed, match="somebody in between"):
        said(Exchange("A", CODE, phone), Exchange("B", CODE, desk), wrong)
