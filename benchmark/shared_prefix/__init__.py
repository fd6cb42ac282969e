"""Parts of `benchmark/shared_prefix_gpu.py`."""
