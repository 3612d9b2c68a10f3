"""The vLLM connector; the only room that imports vllm."""

from millpond.connector.connector import MillpondConnector

__all__ = ["MillpondConnector"]
