"""Listening addresses: whether other machines reach a process, which then needs keys."""

from __future__ import annotations

import re
from ipaddress import ip_address


def is_address(address: str) -> bool:
    """Whether it looks like tcp://HOST:PORT."""
    return re.fullmatch(r"tcp://(\[[^\]\s]+\]|[^\s/:]+):\d{1,5}", address) is not None


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine reach tcp://HOST:PORT."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(address: str) -> bool:
    """Whether it stands for every interface of this machine."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]") in ("0.0.0.0", "::", "*")
