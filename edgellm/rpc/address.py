"""Addresses at which devices listen. Without TLS between paired devices, only loopback addresses are allowed."""

import re
from dataclasses import dataclass
from ipaddress import ip_address

from edgellm.errors import InvalidOption, PairingRequired

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name, IPv4, or IPv6 without brackets) and a TCP port; port 0 lets the system choose when listening."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of(cls, host: str, port: int) -> "Address":
        """Check host and port. `localhost` becomes 127.0.0.1, so that both sides use the same address family."""
        if host.lower() == "localhost":
            host = "127.0.0.1"
        if not is_ip(host) and (not _HOST.fullmatch(host) or host.replace(".", "").isdigit()):
            raise InvalidOption(f"{host!r} is neither a host name nor an IP address.", _EXAMPLE)
        if not 0 <= port <= 65535:
            raise InvalidOption(f"Port {port} is out of range.", "Give a port from 1 to 65535.")
        return cls(host, port)

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse HOST:PORT; an IPv6 host stands in brackets. Raise InvalidOption for anything else."""
        host, colon, port = text.strip().rpartition(":")
        if host.startswith("[") and host.endswith("]") and is_ip(host[1:-1]):
            host = host[1:-1]
        elif ":" in host:
            raise InvalidOption(f"{text!r} has more than one colon.", "Put an IPv6 host in brackets: [::1]:50151.")
        if not colon or not host or not (port.isascii() and port.isdigit() and len(port) <= 5):
            raise InvalidOption(f"{text!r} is not an address.", _EXAMPLE)
        return cls.of(host, int(port))

    @property
    def loopback(self) -> bool:
        """Return whether only this machine can reach the address; False for a name, as it is never certain."""
        return is_ip(self.host) and ip_address(self.host).is_loopback

    @property
    def unspecified(self) -> bool:
        """Return whether it stands for all addresses of a machine: 0.0.0.0 or ::."""
        return is_ip(self.host) and ip_address(self.host).is_unspecified

    def require_loopback(self) -> "Address":
        """Return this address if it is a loopback address; otherwise raise PairingRequired."""
        if not self.loopback:
            raise PairingRequired(
                f"{self} is not a loopback address, and without TLS anyone on the network could read the traffic.",
                "Pair the devices first: run `edgellm pair` here, and the command that it shows on the other device.",
            )
        return self


def is_ip(host: str) -> bool:
    """Return whether a host is an IP address, without a zone."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return "%" not in host


_EXAMPLE = "Give HOST:PORT, for example 127.0.0.1:50151."
