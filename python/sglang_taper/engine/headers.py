"""What the headers of a request say: its SLOs, and whose it is.

The id of a group is a name among those of one credential. SGLang knows one API key and
one admin key, but a gateway in front of a server without keys may pass on those of its
users: two who choose the same id, or guess one, have a group each. Inside a scheduler
a group is called `scope/id`, or `id` when its requests came without an `Authorization`
header; no id of a client has a slash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from sglang_taper.protocol import (
    MAX_SLO_MS,
    SCOPE_KEY,
    TPOT_HEADER,
    TTFT_HEADER,
    check_positive,
)

_SLO_HEADERS = {TTFT_HEADER: "ttft_slo_ms", TPOT_HEADER: "tpot_slo_ms"}


def slos_from_headers(headers: Mapping[str, str]) -> dict[str, float]:
    """Metadata from the SLO headers, in ms; FieldError names the header."""
    return {
        key: check_positive(header, _number(headers[header]), MAX_SLO_MS)
        for header, key in _SLO_HEADERS.items()
        if header in headers
    }


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def scope_of(headers: Mapping[str, str]) -> str:
    """32 hexadecimal digits that stand for the credential of a request, "" for none.

    The scheme (`Bearer`) does not count, as it does not for SGLang.
    """
    _, _, credential = headers.get("authorization", "").strip().rpartition(" ")
    if not credential:
        return ""
    return hashlib.blake2b(credential.encode(), digest_size=16).hexdigest()


def scoped_name(scope: str, group: str) -> str:
    """What the group of that scope is called in a scheduler."""
    return f"{scope}/{group}" if scope else group


def name_in(meta: Mapping[str, str]) -> str:
    """The same, from metadata on its way to the scheduler."""
    return scoped_name(meta.get(SCOPE_KEY, ""), meta["group"])


def scope_in(name: str) -> str:
    """The scope part of a `scoped_name`."""
    return name.rpartition("/")[0]


def id_in(name: str) -> str:
    """The part of a `scoped_name` that the client chose: nobody is shown the other."""
    return name.rpartition("/")[2]
