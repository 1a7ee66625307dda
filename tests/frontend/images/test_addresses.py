"""Which addresses an image may come from."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd.errors import ConfigError
from epdd.frontend.images.addresses import Allowlist, is_public


@pytest.mark.parametrize("text", [
    "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1",
    "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1",
    "2001:db8::1", "100::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:0:7f00:1::",
    "fd00:ec2::254", "168.63.129.16", "::ffff:168.63.129.16", "100.100.100.200", "192.0.0.192",
    "64:ff9b:1::a9fe:a9fe", "3fff::1", "5f00::1", "::ffff:0:127.0.0.1",
])
def test_not_public(text: str) -> None:
    assert not is_public(ip_address(text))


@pytest.mark.parametrize("text", [
    "8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808",
    "2002:808:808::1",
])
def test_public(text: str) -> None:
    assert is_public(ip_address(text))


@given(st.ip_addresses(v=4))
def test_every_spelling_of_an_ipv4_address_counts_the_same(address: object) -> None:
    plain = is_public(ip_address(str(address)))
    number = int(ip_address(str(address)))
    mapped, nat64 = (ip_address((prefix << 32) + number) for prefix in (0xFFFF, 0x64FF9B << 64))
    assert is_public(mapped) == is_public(nat64) == plain


LIST = Allowlist(["Images.Example", "cdn.example:8443", "10.1.0.0/16", "127.0.0.1:9000", "[::1]:80", "fd00::/8"])


@pytest.mark.parametrize(("host", "port", "address", "allowed"), [
    ("images.example", 80, "93.184.216.34", True),
    ("IMAGES.example.", 8080, "10.9.9.9", True),        # a listed host may be internal
    ("cdn.example", 8443, "93.184.216.34", True),
    ("cdn.example", 443, "93.184.216.34", False),
    ("other.example", 80, "93.184.216.34", False),
    ("other.example", 80, "10.1.2.3", True),
    ("10.1.2.3", 80, "10.1.2.3", True),
    ("other.example", 80, "::ffff:10.1.2.3", True),
    ("10.2.0.1", 80, "10.2.0.1", False),
    ("127.0.0.1", 9000, "127.0.0.1", True),
    ("127.0.0.1", 9001, "127.0.0.1", False),
    ("::1", 80, "::1", True),
    ("::1", 81, "::1", False),
    ("x", 80, "fd12::1", True),
    ("notimages.example", 80, "93.184.216.34", False),
    ("images.example.evil.example", 80, "93.184.216.34", False),
])
def test_allowlist(host: str, port: int, address: str, allowed: bool) -> None:
    assert LIST.has(host, port, ip_address(address)) is allowed


@pytest.mark.parametrize("entry", ["10.0.0.1/33", "host:port", "10.1.2.3/8", ":80", "[::1"])
def test_bad_entries_stop_the_start(entry: str) -> None:
    with pytest.raises(ConfigError):
        Allowlist([entry])
