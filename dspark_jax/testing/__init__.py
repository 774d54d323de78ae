"""Instruments for tests of this engine, by us and by anyone who checks it."""

from dspark_jax.testing.scripted import ScriptedEngine

__all__ = ["ScriptedEngine"]
