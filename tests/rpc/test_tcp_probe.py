"""Knocking at a device's addresses."""

from __future__ import annotations

import socket

from edgellm.rpc.address import Address
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.discovery.interfaces import first_listening


def test_of_several_addresses_the_one_that_answers_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("127.0.0.1", 0)) as gone:
        closed = Address("127.0.0.1", gone.getsockname()[1])
        gone.close()
        open_one = Address("127.0.0.1", here.getsockname()[1])
        assert run_in_network_loop(first_listening([closed, open_one])).result() == open_one
        assert run_in_network_loop(first_listening([closed])).result() == closed
