"""Configuration of every process, from file, environment and flags."""

from millpond.config.settings import (
    CONFIG_VARIABLE,
    ConnectorConfig,
    PoolConfig,
    Settings,
    UpConfig,
    connector_config,
    default_socket_path,
    find_config_file,
    load_settings,
)
from millpond.config.values import format_size, parse_size

__all__ = [
    "CONFIG_VARIABLE",
    "ConnectorConfig",
    "PoolConfig",
    "Settings",
    "UpConfig",
    "connector_config",
    "default_socket_path",
    "find_config_file",
    "format_size",
    "load_settings",
    "parse_size",
]
