"""Configuration of every process, from file, environment and flags."""

from millpond.config.processes import ConnectorConfig, PoolConfig, RouterConfig, UpConfig
from millpond.config.settings import (
    CONFIG_VARIABLE,
    ROUTER_IDENTITIES,
    ROUTER_POLICIES,
    ROUTER_SOCKET,
    Settings,
    connector_config,
    default_socket_path,
    find_config_file,
    load_settings,
)
from millpond.config.values import format_size, parse_replica, parse_size

__all__ = [
    "CONFIG_VARIABLE",
    "ROUTER_IDENTITIES",
    "ROUTER_POLICIES",
    "ROUTER_SOCKET",
    "ConnectorConfig",
    "PoolConfig",
    "RouterConfig",
    "Settings",
    "UpConfig",
    "connector_config",
    "default_socket_path",
    "find_config_file",
    "format_size",
    "load_settings",
    "parse_replica",
    "parse_size",
]
