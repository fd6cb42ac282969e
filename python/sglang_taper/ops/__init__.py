"""Decode attention that reads a prefix shared by several rows once.

`segments` describes what is shared, `reference` defines the right answer, `torch_*` are
the CPU implementation. Knows tensors and slots, nothing of SGLang.
"""
