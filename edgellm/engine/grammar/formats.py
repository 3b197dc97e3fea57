"""Patterns of the formats of strings.

Where a format allows more than clients read, the pattern is narrower: names in addresses have a limited length, times
have an offset (RFC 3339), and URIs are HTTP's.
"""

from __future__ import annotations

_DAYS = (
    r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8])"
)  # fmt: skip
_YEAR = r"(?:\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000)"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:{_YEAR}-(?:{_DAYS})|{_LEAP_YEAR}-02-29)"
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_CLOCK}:[0-5]\d(?:\.\d{{1,6}})?(?:Z|[+-]{_CLOCK})"
_SECONDS = r"\d{1,4}S"
_MINUTES = rf"\d{{1,4}}M(?:{_SECONDS})?"
_HOURS = rf"\d{{1,4}}H(?:{_MINUTES})?"
_OF_DAY = rf"T(?:{_HOURS}|{_MINUTES}|{_SECONDS})"
_DAY = r"\d{1,4}D"
_MONTH = rf"\d{{1,4}}M(?:{_DAY})?"
_DURATION = rf"P(?:(?:{_DAY}|{_MONTH}|\d{{1,4}}Y(?:{_MONTH})?)(?:{_OF_DAY})?|{_OF_DAY}|\d{{1,4}}W)"
_HEX = r"[0-9A-Fa-f]"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H = rf"{_HEX}{{1,4}}"
_IPV6 = (
    rf"(?:(?:{_H}:){{7}}{_H}|(?:{_H}:){{1,7}}:|(?:{_H}:){{1,6}}:{_H}|(?:{_H}:){{1,5}}(?::{_H}){{2}}"
    rf"|(?:{_H}:){{1,4}}(?::{_H}){{3}}|(?:{_H}:){{1,3}}(?::{_H}){{4}}|(?:{_H}:){{1,2}}(?::{_H}){{5}}"
    rf"|{_H}:(?::{_H}){{6}}|:(?:(?::{_H}){{1,7}}|:))"
)
_LABEL = r"[a-z0-9]{1,12}(?:-[a-z0-9]{1,12}){0,2}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,2}}\.[a-z]{{2,12}}"
_LOCAL_PART = r"[A-Za-z0-9_+-]{1,20}(?:\.[A-Za-z0-9_+-]{1,20}){0,2}"
_OF_PATH = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})"
_URI = (
    rf"https?://(?:{_HOST}|localhost|{_IPV4})(?::[1-9]\d{{0,3}})?(?:/{_OF_PATH}{{0,80}})?"
    rf"(?:\?{_OF_PATH}{{0,40}})?(?:#{_OF_PATH}{{0,20}})?"
)


def _uuid(version: str) -> str:
    return rf"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"


def _base64(more: str) -> str:
    char = f"[A-Za-z0-9{more}]"
    return f"(?:{char}{{4}})*(?:{char}[AQgw]==|{char}{{2}}[AEIMQUYcgkosw048]=)?"


_WHOLE = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    **{f"uuid{version}": _uuid(str(version)) for version in range(1, 9)},
    "email": rf"{_LOCAL_PART}@{_HOST}",
    "idn-email": rf"{_LOCAL_PART}@{_HOST}",
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
    "uri": _URI,
    "iri": _URI,
    "uri-reference": _URI,
    "iri-reference": _URI,
    "json-pointer": r"(?:/(?:[^~/]|~[01])*)*",
    "base64": _base64("+/"),
    "byte": _base64("+/"),
    "base64url": _base64("_-"),
}
FORMATS = {name: f"^{pattern}$" for name, pattern in _WHOLE.items()}
"""Patterns of the formats that a grammar keeps, by name."""
