"""Who may ask what, whose group is whose, and where no prompt is to be found."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests as http
from forking import branch_of, meta_of, new_group, reason_of, some_ids, wait_for

from server import EXACT, Server, running_server

USER, ADMIN = f"user-{uuid.uuid4().hex}", f"admin-{uuid.uuid4().hex}"
# Words that no model, log line or metric has of itself.
SECRET = "Xylophagous Zwieback"


def ours(server: Server) -> list[tuple[str, str]]:
    """Method and path of every route of this package, as the server describes it."""
    paths = server.get_json("/openapi.json", key=USER)["paths"]
    return [
        (method.upper(), path)
        for path, methods in paths.items()
        if path.startswith("/taper")
        for method in methods
    ]
