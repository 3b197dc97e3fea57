"""What another device has sent is parsed in one place, and not beyond its size."""

from __future__ import annotations

import pytest

from edgellm.errors import ProtocolError
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.versions import parse_message


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05x", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"])
def test_what_is_no_message_is_one_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="PairDone cannot be parsed"):
        parse_message(pb.PairDone, data)


def test_a_message_beyond_its_size_is_not_parsed() -> None:
    data = pb.PairDone(mac=b"x" * 100).SerializeToString()
    with pytest.raises(ProtocolError, match="102 bytes; 50 are allowed"):
        parse_message(pb.PairDone, data, 50)
