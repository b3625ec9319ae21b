"""Connectors: how inference engines use the store. Each module needs its own engine, and loads it on first use."""
