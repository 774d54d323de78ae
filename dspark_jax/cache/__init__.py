"""Caches: their arrays and layouts, and who owns which page."""
