"""What can go wrong, as a tree.

TaperError
├── FieldError            a value from outside is not acceptable (HTTP 400, exit code 2)
│   └── UnsupportedMode   the server was asked for a mode we refuse
├── FrontEndError         the program of a front end failed (HTTP 400)
├── ExtensionError        a policy or front end of the user's can not be had
├── HookError             SGLang is not what our hooks were written against
├── ServerProcessError    a server we started does not serve, or can not be ended
│   └── ServerEnded       it is gone
├── NoAnswer              a running server does not answer, or refuses
└── ModelUnavailable      the embedded model can not be built or found
"""

import reprlib

MAX_SHOWN = 80
# A field may be a key that a client made up.
MAX_FIELD = 160

# Not `repr`: a value from outside may be nested deeper than that can follow.
_outline = reprlib.Repr()
_outline.maxlevel = 5
_outline.maxstring = _outline.maxother = MAX_SHOWN
_outline.maxdict = _outline.maxlist = _outline.maxtuple = 16


def _clipped(text: str, length: int = MAX_SHOWN) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


class TaperError(Exception):
    """Base of every error this package raises on purpose."""


class FieldError(TaperError, ValueError):
    """A value from outside is wrong: names field, value and what is accepted."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        shown = f"{_clipped(field, MAX_FIELD)}={_clipped(_outline.repr(value))}"
        super().__init__(f"{shown} is not valid: {accepted}")
        self.field, self.value, self.accepted = field, value, accepted


class UnsupportedMode(FieldError):
    """A mode of SGLang that branch policies do not work with, refused at start-up."""


class FrontEndError(TaperError, ValueError):
    """A front end failed on a request. A ValueError: SGLang answers 400 with it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"front end {name} failed: {reason}")


class ExtensionError(TaperError):
    """An entry point for a policy or a front end is not what it must be."""


class HookError(TaperError):
    """A hook target is missing, has changed, or was not patched."""


class ModelUnavailable(TaperError):
    """The embedded model is neither in the cache nor obtainable."""


class NoAnswer(TaperError):
    """A server that a command asks does not answer, or refuses."""


class ServerProcessError(TaperError):
    """A server that a command started does not serve, or can not be ended."""


class ServerEnded(ServerProcessError):
    """The server that a command started is gone."""
