"""Paths of other projects, each with its own imports, made only when asked for."""
