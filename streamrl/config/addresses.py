"""Listening addresses: whether other machines reach a process, which then needs keys."""

from __future__ import annotations

import re
from ipaddress import ip_address

from streamrl.config.schema_system import EndpointConfig
from streamrl.errors import ConfigError


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
            "env.agent=outside lets programs open episodes by HTTP, and nothing says which: export a key, and set the "
            "name of its variable, as actors.endpoint.admin_key_env=STREAMRL_ADMIN_KEY"
        )
