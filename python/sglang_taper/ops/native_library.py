"""The C attention of `kernels/cpu`, compiled on the machine that runs it.

The first start compiles it for this CPU and keeps the library under
`$XDG_CACHE_HOME/sglang_taper/native` (or `~/.cache`), under a name made from source,
compiler and CPU. It uses the OpenMP runtime that PyTorch has loaded: threads of a
second one would spin against those of the first.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

SOURCE = Path(__file__).parents[1] / "kernels" / "cpu" / "shared_prefix.c"
COMPILE = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fopenmp")
COMPILE_TIMEOUT_S = 120
# Vectors of 8 floats: with shorter ones PyTorch's attention is the faster one.
MIN_LANES = 8
FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_OPENMP = re.compile(r"(/\S*/lib(?:gomp|iomp5|omp)\S*\.so\S*)$")


class NativeUnavailable(Exception):
    """Why the library can not be had, in one phrase."""


class Call(ctypes.Structure):
    """`struct call` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("q_row", "q_head", "k_slot", "k_head", "v_slot", "v_head"),
                *("out_row", "out_head", "lse_row"),
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("table", "items", "rows", "merges", "partials"),
                *("partial_out", "partial_lse"),
            )
        ),
        ("num_items", ctypes.c_int64),
        ("num_merges", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("q_type", "kv_type", "kv_heads", "group", "dim", "value_dim"),
                "num_threads",
            )
        ),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class Library:
    """The functions of a compiled library. Calls release the GIL."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        self.lanes = int(loaded.taper_lanes())
        self._attend = loaded.taper_attend
        self._attend.argtypes = [ctypes.POINTER(Call)]
        self._has_float16 = bool(loaded.taper_has_float16())

    def serves(self, *dtypes: torch.dtype) -> bool:
        """Whether tensors may have these types."""
        return all(
            dtype in FLOAT_TYPES and (dtype != torch.float16 or self._has_float16)
            for dtype in dtypes
        )

    def attend(self, call: Call) -> None:
        """Raises MemoryError."""
        if self._attend(call):
            raise MemoryError("attention: no memory for packed keys and values")


@functools.cache
def find_library(*more_flags: str) -> Library | NativeUnavailable:
    """The library, compiled if need be, or why there is none. Asked once a process.

    `more_flags` are for the compiler, behind ours.
    """
    try:
        _use_openmp_of_torch()
        library = Library(compiled(more_flags))
    except NativeUnavailable as reason:
        return reason
    except OSError as error:
        return NativeUnavailable(f"the library does not load: {error}")
    if library.lanes < MIN_LANES:
        return NativeUnavailable(f"vectors of {library.lanes} floats")
    return library


def compiled(more_flags: Sequence[str] = ()) -> Path:
    """The library's file; compiles it if it is not there.

    Several processes may do so at once: each writes a file of its own and renames it.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    flags = [*COMPILE, *more_flags]
    facts = [_run([*compiler, "--version"]), _cpu(), *compiler, *flags]
    facts += [file.read_text() for file in sorted(SOURCE.parent.glob("*.[ch]"))]
    name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    path = cache_folder() / f"shared_prefix-{name}.so"
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _compile(compiler, flags, path)
        except OSError as error:
            raise NativeUnavailable(f"the cache can not be written: {error}") from None
    return path


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang_taper" / "native"


def _compile(compiler: list[str], flags: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        parts = [str(Path(folder) / name) for name in ("part.o", "whole.so")]
        _run([*compiler, *flags, "-c", str(SOURCE), "-o", parts[0]])
        # without -fopenmp, which would bring the compiler's own runtime along
        _run([*compiler, "-shared", parts[0], "-o", parts[1], "-lm"])
        os.replace(parts[1], path)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
        )
    except FileNotFoundError:
        raise NativeUnavailable(f"no C compiler: {command[0]} not found") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the C compiler does not run: {error}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NativeUnavailable(f"the C compiler failed: {last}")
    return done.stdout


def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kinds)))


def _use_openmp_of_torch() -> None:
    """Make the symbols of PyTorch's OpenMP runtime visible to what is loaded next."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        lines = []
    found = {match[1] for line in lines if (match := _OPENMP.search(line))}
    if not found:
        raise NativeUnavailable("PyTorch has loaded no OpenMP runtime")
    of_torch = str(Path(torch.__file__).parent.parent)
    ours = min(found, key=lambda path: (not path.startswith(of_torch), path))
    ctypes.CDLL(ours, ctypes.RTLD_GLOBAL)
