"""Kernels behind `sglang_taper.ops`: Triton here, C for the CPU in `cpu/`.

The sources live in the repository's `kernels/`; `python/sglang_taper/kernels` is a
link to it, so a wheel, an editable install and a source tree on the path all find them
as `sglang_taper.kernels`. Which kernel runs when is in README.md beside this file.
"""
