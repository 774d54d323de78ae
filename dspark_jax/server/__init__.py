"""OpenAI-compatible HTTP server over an ``AsyncEngine``."""
