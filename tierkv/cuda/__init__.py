"""Copies on NVIDIA GPUs: torch tensors and streams at the interface, CuPy for kernels, batched copies and pinning.

Importing this package or any of its modules loads neither torch nor CuPy; making a ``CudaDevice`` does.
"""
