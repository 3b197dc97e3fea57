"""A device's own key and certificate, and what is taken for one of another device."""

from __future__ import annotations

import base64
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import InvalidOption, NotPaired, TrustUnusable
from edgellm.rpc.trust.identity import ALPHABET, Certificate, DeviceID, Identity, parse_short, pem_id
from tests.rpc.strangers import certified


def test_it_is_made_once_and_private(tmp_path: Path) -> None:
    first, again = Identity.load(tmp_path / "trust"), Identity.load(tmp_path / "trust")
    path = tmp_path / "trust" / "identity.pem"
    assert first.id == again.id == pem_id(first.certificate.pem)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert Identity.load(tmp_path / "other").id != first.id


@pytest.mark.parametrize("kept", [b"", b"nonsense", b"key", b"certificate", b"mixed"])
def test_a_damaged_one_is_said_and_not_replaced(tmp_path: Path, kept: bytes) -> None:
    one, other = Identity.new(), Identity.new()
    made = {b"key": one.key_pem, b"certificate": one.certificate.pem, b"mixed": one.key_pem + other.certificate.pem}
    kept = made.get(kept, kept)
    path = tmp_path / "identity.pem"
    path.write_bytes(kept)
    with pytest.raises(TrustUnusable, match=r"identity\.pem is damaged"):
        Identity.load(tmp_path)
    assert path.read_bytes() == kept


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"ca": True}, "may sign other certificates"), ({"issuer": Identity.new()}, "not self-signed"),
        ({"curve": "P-384"}, "P-256"), ({"subject": "edgellm-of-another"}, "subject"),
        ({"constraints": False}, "damaged"),
    ],
)  # fmt: skip
def test_certificates_of_another_kind_are_refused(how: dict[str, object], says: str) -> None:
    with pytest.raises(NotPaired, match=says):
        Certificate.of(certified(**how).certificate.der)  # type: ignore[arg-type]


@pytest.mark.parametrize("der", [b"", b"x" * 100])
def test_what_is_no_certificate_is_refused(der: bytes) -> None:
    with pytest.raises(NotPaired, match="damaged"):
        Certificate.of(der)
    with pytest.raises(NotPaired, match="damaged"):
        pem_id(der)


def test_whatever_is_odd_in_a_certificate_is_one_error() -> None:
    """The library has errors of its own, outside any common class, for a version and for an extension that is twice."""
    der = Identity.new().certificate.der
    constraints = bytes.fromhex("300c0603551d130101ff04023000")
    odd = (
        der.replace(bytes.fromhex("a003020102"), bytes.fromhex("a003020109"), 1),
        der.replace(bytes.fromhex("0603551d11"), bytes.fromhex("0603551d13"), 1),  # the names become constraints
    )
    assert constraints in der
    for made in odd:
        assert made != der
        with pytest.raises(NotPaired, match="damaged"):
            Certificate.of(made)
        with pytest.raises(NotPaired, match="damaged"):
            Certificate.of_pem(x509_pem(made))


def x509_pem(der: bytes) -> bytes:
    return b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(der) + b"-----END CERTIFICATE-----\n"


shorts = st.builds(lambda digest: DeviceID(digest).short, st.binary(min_size=32, max_size=32))
LOOK_ALIKES = {"1": "1iIlL", "0": "0oO", "8": "8bB"}


@given(shorts, st.data())
def test_case_grouping_and_look_alikes_do_not_matter(short: str, data: st.DataObject) -> None:
    assert parse_short(short) == short
    typed = "".join(
        data.draw(st.sampled_from(LOOK_ALIKES.get(sign, sign + sign.lower()))) for sign in short if sign != "-"
    )
    assert parse_short(typed[:5] + data.draw(st.sampled_from(["", " ", "-", " - "])) + typed[5:]) == short


@given(shorts, st.integers(0, 7), st.sampled_from(ALPHABET))
def test_any_single_wrong_sign_is_found(short: str, at: int, wrong: str) -> None:
    signs = short.replace("-", "")
    if signs[at] != wrong:
        with pytest.raises(InvalidOption, match="mistyped"):
            parse_short(signs[:at] + wrong + signs[at + 1 :])


@given(shorts, st.integers(0, 7), st.integers(0, 7))
def test_two_signs_that_changed_places_are_found(short: str, first: int, second: int) -> None:
    signs = list(short.replace("-", ""))
    if signs[first] != signs[second]:
        signs[first], signs[second] = signs[second], signs[first]
        with pytest.raises(InvalidOption, match="mistyped"):
            parse_short("".join(signs))


@pytest.mark.parametrize("text", ["", "K7QF", "K7QF-2MXU", "K7QF-2MX\x1b", "äöüäöüäö", "K7QF-2MX9-1"])
def test_what_is_none_is_said(text: str) -> None:
    with pytest.raises(InvalidOption):
        parse_short(text)
