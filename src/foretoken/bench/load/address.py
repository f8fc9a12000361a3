"""Servers under test: addresses, names, and that no stranger's server is loaded by accident."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from foretoken.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Server:
    """One server: what it is called in reports, and where its API begins (ends in /v1)."""

    name: str
    url: str


def servers_of(
    addresses: Sequence[str], names: Sequence[str], allow_remote: bool = False
) -> list[Server]:
    """The servers under test, named as asked or by host and port."""
    urls = [api_of(address, allow_remote) for address in addresses]
    shown = list(names) or [urlsplit(url).netloc.rsplit("@", 1)[-1] for url in urls]
    if len(shown) != len(urls):
        raise ConfigError(
            f"{len(shown)} names were passed for {len(urls)} servers.",
            "names belong to the addresses, in their order.",
            "pass one name per address, such as --names ours,vllm, or none.",
        )
    twice = [name for name, count in Counter(shown).items() if count > 1]
    if twice:
        raise ConfigError(
            f"two servers are called {twice[0]}.",
            "results are told apart by names.",
            "name them apart with --names.",
        )
    return [Server(name, url) for name, url in zip(shown, urls, strict=True)]


def api_of(address: str, allow_remote: bool = False) -> str:
    """Where the API begins, from an address with or without /v1."""
    try:
        parts = urlsplit(address if "//" in address else f"http://{address}")
        host, _ = parts.hostname, parts.port  # a port that is no number raises
    except ValueError as problem:
        raise unusable(address) from problem
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise unusable(address)
    if not (allow_remote or is_loopback(host)):
        raise ConfigError(
            f"a load test of {host}.",
            "without leave only servers on this machine are loaded (127.0.0.1, ::1, localhost): a "
            "load test must not hit somebody else's server by accident.",
            "pass --allow-remote if that server is yours to load, or a local address.",
        )
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else f'{path}/v1'}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine beyond doubt. Other names may lead anywhere."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def unusable(address: str) -> ConfigError:
    return ConfigError(
        f"the address {address!r} was passed.",
        "an address is http:// or https://, a host and a port, with /v1 or without.",
        "pass for example http://127.0.0.1:8000.",
    )
