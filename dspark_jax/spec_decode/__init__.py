"""Speculative decoding: verification of drafts."""
