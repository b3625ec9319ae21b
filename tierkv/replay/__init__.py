"""Recorded traffic, replayed through the real policies with simulated tiers: ``tierkv replay`` and ``tierkv plan``."""
