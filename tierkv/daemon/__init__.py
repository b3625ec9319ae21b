"""The sidecar: one process owns the arena, NVMe and Valkey, and engines on the host share them through its memory."""
