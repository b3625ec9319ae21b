"""Measurements: each edge of the store beside its physical limit."""
