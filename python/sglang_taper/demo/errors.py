"""Why a demo ends early."""

from __future__ import annotations

from sglang_taper.errors import TaperError


class DemoError(TaperError):
    """The demo can not go on; the message is one sentence for its user."""


class ProgramError(DemoError):
    """The forking program failed, most likely because the server did."""
