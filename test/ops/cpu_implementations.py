"""The ways to compute attention on a CPU, which all pass the same tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from sglang_taper.ops import native_attention, torch_decode, torch_extend
from sglang_taper.ops.native_library import Library, find_library


class Implementation(NamedTuple):
    """`flags`: the C kernel, compiled with these; None: PyTorch."""

    name: str
    flags: tuple[str, ...] | None

    def make_plan(self, *args: Any, **options: Any) -> Any:
        return self._call(torch_decode.make_plan, *args, **options)

    def decode(self, *args: Any, **options: Any) -> Any:
        return self._call(torch_decode.decode, *args, **options)

    def make_extend_plan(self, *args: Any) -> Any:
        return self._call(torch_extend.make_extend_plan, *args)

    def extend(self, *args: Any) -> Any:
        return self._call(torch_extend.extend, *args)

    def _call(self, of_torch: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.flags is None:
            return of_torch(*args, **options)
        library = find_library(*self.flags)
        if not isinstance(library, Library):
            pytest.skip(str(library))
        with patch.object(native_attention, "find_library", lambda: library):
            return getattr(native_attention, of_torch.__name__)(*args, **options)


TORCH = Implementation("torch", None)
NATIVE = Implementation("native", ())
SHORT_VECTORS = Implementation("native without AVX-512", ("-mno-avx512f",))
CPUS = pytest.mark.parametrize(
    "cpu",
    [TORCH, NATIVE, SHORT_VECTORS],
    ids=lambda implementation: implementation.name,
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def each(test: Any) -> Any:
    """Every implementation, with every type that all of them serve."""
    return DTYPES(CPUS(test))
