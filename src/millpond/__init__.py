"""Millpond: one KV cache in host memory for all vLLM replicas of a model."""

__version__ = "0.1.0"
