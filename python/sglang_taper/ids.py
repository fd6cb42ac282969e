"""Ids that clients and server make up for requests."""

from __future__ import annotations

import secrets
import uuid


def new_group() -> str:
    """An id for a new request: 32 hexadecimal digits, 128 random bits."""
    return secrets.token_hex(16)


def new_rid() -> str:
    """A request id that is no prefix of another: SGLang's abort matches prefixes."""
    return uuid.uuid4().hex + "/"
