"""Listening addresses: who reaches a process, by which keys, and past which proxies."""

from __future__ import annotations

import os
import re
from dataclasses import fields, is_dataclass
from ipaddress import ip_address
from socket import AF_INET, AF_INET6
from typing import Any
from urllib.parse import urlsplit

from streamrl.config.schema_system import EndpointConfig
from streamrl.errors import ConfigError


def is_address(address: str) -> bool:
    """Whether it looks like tcp://HOST:PORT."""
    return re.fullmatch(r"tcp://(\[[^\]\s]+\]|[^\s/:]+):\d{1,5}", address) is not None


def in_url(host: str) -> str:
    """A host as it stands in front of :PORT; an address of IPv6 has brackets there."""
    return f"[{host.strip('[]')}]" if ":" in host else host


def advertised(host: str, setting: str) -> str:
    """The address to tell others: of a network interface of this machine, its first one; else what was given.

    Raises ConfigError: that interface has no address.
    """
    import psutil

    if host not in (interfaces := psutil.net_if_addrs()):
        return host
    found = [one.address for kind in (AF_INET, AF_INET6) for one in interfaces[host] if one.family == kind]
    if not (found := [one for one in found if not one.startswith("fe80:")]):
        raise ConfigError(f"{setting}={host} is an interface of this machine without an address: give a host name")
    return found[0]


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


def check_endpoint(endpoint: EndpointConfig, agent: str | None) -> None:
    """Raise ConfigError for an address of agents that is none, or that no agent or that any program could use."""
    bind, advertise = endpoint.bind, endpoint.advertise
    if not is_address(f"tcp://{bind}"):
        raise ConfigError(f"actors.endpoint.bind={bind} must look like 127.0.0.1:0: write a host and a port")
    if is_wildcard(f"tcp://{bind}") and advertise is None:
        raise ConfigError(
            f"actors.endpoint.bind={bind} listens on every interface and names none that agents could use: add "
            "actors.endpoint.advertise=NAME"
        )
    if agent == "outside" and endpoint.admin_key_env is None:
        raise ConfigError(
            "env.agent=outside lets any program open episodes by HTTP: export a key, and set the name of its "
            "variable, such as actors.endpoint.admin_key_env=STREAMRL_ADMIN_KEY"
        )


_keys = {"STREAMRL_API_KEY", "STREAMRL_RANK_KEYS"}
"""Variables with keys of the runs of this process, which are none of their programs' business."""


def hide_keys(section: Any) -> None:
    """Hide the variables that settings `*_env` name from programs that this process starts."""
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            hide_keys(value)
        elif item.name.endswith("_env") and value:
            _keys.add(value)


def key_of(setting: str, variable: str | None) -> str | None:
    """The key in the variable that a setting names; None if it names none. Raises ConfigError if it is not set."""
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise ConfigError(f"{setting}={variable}, but this variable is not set: export it")
    return key


def environment_without_keys() -> dict[str, str]:
    """The environment for programs that play episodes: this one without the keys of the run."""
    return {name: value for name, value in os.environ.items() if name not in _keys}


def reach_directly(url: str) -> None:
    """Let this process and those that it starts reach the host of a URL, and loopback, past any proxy of HTTP."""
    hosts = [host for host in (urlsplit(url).hostname, "127.0.0.1", "localhost", "::1") if host]
    upper, lower = os.environ.get("NO_PROXY", ""), os.environ.get("no_proxy", "")
    for name, value in {"NO_PROXY": upper or lower, "no_proxy": lower or upper}.items():  # libraries read either
        known = [one.strip() for one in value.split(",") if one.strip()]
        if known != ["*"]:  # no host has a proxy then; many know the star only where it stands alone
            os.environ[name] = ",".join([*known, *(host for host in dict.fromkeys(hosts) if host not in known)])
