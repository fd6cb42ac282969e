"""Small integer arrays that change every step and must not move on the device.

All arrays lie in one tensor, so a step costs one copy. On CUDA the host side is pinned
and there are several, because a copy may still be waiting when the next step is
planned.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Steps whose copy may be on its way at the same time.
STAGES = 3
LINE_INTS = 32  # 128 bytes


class StagedInts:
    """Named int32 arrays: written on the host, read at fixed addresses on `device`.

    `sizes` names the arrays and their lengths, in the order they lie in memory.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        self._at: dict[str, slice] = {}
        start = 0
        for name, size in sizes.items():
            self._at[name] = slice(start, start + size)
            start += -(-size // LINE_INTS) * LINE_INTS
        on_cuda = device.type == "cuda"
        self._device = torch.zeros(start, dtype=torch.int32, device=device)
        self._stages = [
            torch.zeros(start, dtype=torch.int32, pin_memory=on_cuda)
            for _ in range(STAGES)
        ]
        self._copied = [torch.cuda.Event() if on_cuda else None for _ in range(STAGES)]
        self._step = 0

    def on_device(self, name: str) -> torch.Tensor:
        """The array as kernels read it; always the same memory."""
        return self._device[self._at[name]]

    def on_host(self) -> dict[str, torch.Tensor]:
        """The arrays to write for the next `send`; they hold old values.

        Waits only if the copy from `STAGES` sends ago has not happened yet.
        """
        event = self._copied[self._step]
        if event is not None:
            event.synchronize()
        stage = self._stages[self._step]
        return {name: stage[at] for name, at in self._at.items()}

    def send(self, last: str | None = None, num_used: int = 0) -> None:
        """Copy to the device on the current stream.

        With `last`, only up to the first `num_used` numbers of that array.
        """
        stage = self._stages[self._step]
        end = len(stage) if last is None else self._at[last].start + num_used
        self._device[:end].copy_(stage[:end], non_blocking=True)
        event = self._copied[self._step]
        if event is not None:
            event.record()
        self._step = (self._step + 1) % STAGES
