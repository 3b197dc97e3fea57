"""The exchange is bound to both certificates twice over, and either binding alone finds a swapped one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import spake2
from spake2 import SPAKE2_A, SPAKE2_B

from edgellm.errors import PairingFailed
from edgellm.rpc.trust import pairing
from edgellm.rpc.trust.identity import Certificate, Identity
from edgellm.rpc.trust.pairing import Code, Exchange

CODE = Code(7, ("lamp", "otter"))


def without_the_transcript(patch: pytest.MonkeyPatch) -> None:
    same = SimpleNamespace(digest=lambda: bytes(32))
    patch.setattr(pairing, "hashlib", SimpleNamespace(sha256=lambda _data: same))


def without_spakes_identities(patch: pytest.MonkeyPatch) -> None:
    blind = property(lambda _self: b"", lambda _self, _value: None)
    for name, side in (("SPAKE2_A", SPAKE2_A), ("SPAKE2_B", SPAKE2_B)):
        patch.setattr(spake2, name, type(name, (side,), {"idA": blind, "idB": blind}))


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
    desk, phone = Identity.new(), Identity.new()
    mallory = Identity.new().certificate
    right = (desk.certificate, phone.certificate)
    assert said(Exchange("A", CODE, phone), Exchange("B", CODE, desk), right) == b"words"
    wrong = (mallory, phone.certificate) if swapped == 0 else (desk.certificate, mallory)
    with pytest.raises(PairingFailed, match="tampered with"):
        said(Exchange("A", CODE, phone), Exchange("B", CODE, desk), wrong)


def agreed() -> tuple[Exchange, Exchange, Identity, Identity]:
    """Both sides of an exchange, A and B, up to their confirmations; and their identities."""
    phone, desk = Identity.new(), Identity.new()
    one, other = Exchange("A", CODE, phone), Exchange("B", CODE, desk)
    one.agree(desk.certificate, other.spake)
    other.agree(phone.certificate, one.spake)
    return one, other, phone, desk


def test_a_confirmation_is_signed_by_the_certificates_key() -> None:
    one, other, _, _ = agreed()
    mac, sealed, signature = one.confirm(b"words")
    assert other.check(mac, sealed, signature) == b"words"
    for forged in (b"", bytes(70), signature[:-1], Identity.new().sign(sealed)):
        with pytest.raises(PairingFailed, match="does not hold the key"):
            other.check(mac, sealed, forged)


def test_a_signature_counts_for_one_side_one_exchange_and_one_set_of_words() -> None:
    one, other, phone, desk = agreed()
    mac, sealed, _ = one.confirm(b"words")
    again, _, _, _ = agreed()
    statement = one._statement("A", sealed)
    assert other.check(mac, sealed, phone.sign(statement)) == b"words"
    for signature in (
        other.confirm(b"words")[2],  # its own, reflected
        desk.sign(statement),
        phone.sign(one._statement("B", sealed)),
        phone.sign(one._statement("A", sealed + b"x")),
        phone.sign(again._statement("A", sealed)),
    ):
        with pytest.raises(PairingFailed, match="does not hold the key"):
            other.check(mac, sealed, signature)
