"""Hosts that images may be fetched from.  Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address

from epdd.errors import ConfigError

Address = IPv4Address | IPv6Address

# Beyond what `ipaddress` knows, which depends on its version: protocol assignments (Oracle's metadata service is one),
# Azure's service for its machines' settings, NAT64 for local use, documentation, SRv6.
_LOCAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "168.63.129.16/32", "64:ff9b:1::/48", "3fff::/20",
                                          "5f00::/16")))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_V4_COMPATIBLE = ipaddress.IPv6Network("::/96")     # long deprecated, still parsed


def is_public(address: Address) -> bool:
    """A host on the open internet: not private, loopback, link-local (metadata), multicast or reserved, nor
    an IPv6 spelling of such an IPv4 address."""
    if isinstance(address, IPv6Address):
        inner = _embedded(address)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local or address.scope_id is not None:
            return False
    if any(address in network for network in _LOCAL):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _embedded(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that a packet to this IPv6 address would reach; None if it holds none."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _NAT64 or address in _V4_COMPATIBLE:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None


class Allowlist:
    """Entries are `host` (any port), `host:port`, or a network such as `10.1.0.0/16`."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises ConfigError on an entry that is none of these."""
        self._hosts: set[tuple[str, int | None]] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in entries:
            self._add(entry)

    def has(self, host: str, port: int, address: Address) -> bool:
        """Whether `address`, which `host` resolves to, may be dialled."""
        name = host.lower().rstrip(".")
        if (name, None) in self._hosts or (name, port) in self._hosts:
            return True
        inner = _embedded(address) if isinstance(address, IPv6Address) else None
        return any((inner or address) in network for network in self._networks)

    def _add(self, entry: str) -> None:
        try:
            # An address without a slash is a host: a port may follow it.
            if "/" in entry:
                self._networks.append(ipaddress.ip_network(entry))
                return
            host, port = _split_port(entry)
            if not host:
                raise ValueError("no host")
            self._hosts.add((host, port))
        except ValueError as error:
            raise ConfigError(f"media.allow: {entry!r} is no host, host:port or network ({error})") from None


def _split_port(entry: str) -> tuple[str, int | None]:
    name = entry.lower()
    if name.startswith("["):            # [::1] or [::1]:8080
        host, bracket, rest = name[1:].partition("]")
        if not bracket or rest and not rest.startswith(":"):
            raise ValueError("brackets")
        return str(ipaddress.IPv6Address(host)), int(rest[1:]) if rest else None
    if name.count(":") == 1:
        host, _, port = name.partition(":")
        return host.rstrip("."), int(port)
    return name.rstrip("."), None
