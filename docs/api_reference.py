"""Prints docs/api.md, made from the code: `python docs/api_reference.py > docs/api.md`.

Routes come from the OpenAPI schema of the server's app, flags from the argument
parsers, metadata from the checks that refuse it, Python from signatures and docstrings.
A test fails when the page is not what this prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from sglang_taper.changes import updated_params
from sglang_taper.cli import _parser
from sglang_taper.config import TaperConfig, env_of, flag_of
from sglang_taper.errors import FieldError
from sglang_taper.front_ends.types import FrontEnd, Part, Prompt, Said
from sglang_taper.frontend.client import StreamEvent, TaperClient
from sglang_taper.frontend.endpoint import RuntimeEndpoint
from sglang_taper.policy.admission import AdmissionPolicy
from sglang_taper.policy.types import AdmissionPlan, PolicyParams, RequestView, StepView
from sglang_taper.protocol import (
    FRONT_END_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
    BranchMeta,
    parse_branch_meta,
)

HEAD = """\
# API reference

Made from the code: `python docs/api_reference.py > docs/api.md`.
What things mean, and the keys of states and answers: [operations](operations.md).
How to use them: [writing programs](writing_programs.md), [extending](extending.md).
"""
CLASSES: tuple[type, ...] = (
    *(RuntimeEndpoint, TaperClient, StreamEvent),
    *(AdmissionPolicy, StepView, RequestView, AdmissionPlan),
    *(FrontEnd, Prompt, Part, Said),
)
# Which no value is: the error says what would be.
NOTHING = object()


def page() -> str:
    """The whole page; ends with a newline."""
    sections = (routes(), changes(), metadata(), settings(), commands(), classes())
    return "\n".join((HEAD, *("\n".join(section) for section in sections))) + "\n"


def cell(text: object) -> str:
    """Text for one cell of a table."""
    return re.sub(r"\s+", " ", str(text)).strip().replace("|", "\\|")


def table(*rows: tuple[object, ...]) -> Iterator[str]:
    """Lines of a table; the first row is its head. Ends with an empty line."""
    head, *body = rows
    for row in (head, ("---",) * len(head), *body):
        yield "| " + " | ".join(map(cell, row)) + " |"
    yield ""


# -- HTTP


def routes() -> Iterator[str]:
    yield "## Routes"
    yield "Beside those of SGLang. `GET /openapi.json` of a server has all of them.\n"
    for path, method, operation in our_operations():
        yield f"### `{method.upper()} {path}`"
        yield operation.get("description", operation.get("summary", "")).strip() + "\n"
        yield from body_of(operation)
        answers = operation.get("responses", {})
        yield from table(
            ("status", "answer"),
            *((code, answers[code].get("description", "")) for code in sorted(answers)),
        )


def our_operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, method and OpenAPI operation of each route of ours, references resolved."""
    from fastapi.openapi.utils import get_openapi
    from sglang.srt.entrypoints.http_server import app

    from sglang_taper.engine.routes import install_routes

    install_routes(app)
    ours = [route for route in app.routes if is_ours(route)]
    schema = get_openapi(title="ours", version="1", routes=ours)
    for path in sorted(schema["paths"]):
        for method, operation in schema["paths"][path].items():
            yield path, method, resolved(operation, schema)


def is_ours(route: Any) -> bool:
    module = str(getattr(getattr(route, "endpoint", None), "__module__", ""))
    return module.startswith("sglang_taper.")


def resolved(node: Any, schema: dict[str, Any], depth: int = 0) -> Any:
    """`node` with its `$ref` replaced by what they name, three levels deep."""
    if isinstance(node, list):
        return [resolved(item, schema, depth) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node and depth < 3:
        target: Any = schema
        for name in node["$ref"].split("/")[1:]:
            target = target[name]
        return resolved(target, schema, depth + 1)
    return {key: resolved(value, schema, depth) for key, value in node.items()}


def body_of(operation: dict[str, Any]) -> Iterator[str]:
    content = operation.get("requestBody", {}).get("content", {})
    body = content.get("application/json", {}).get("schema", {})
    fields = body.get("properties", {})
    if fields:
        required = body.get("required", ())
        rows = [
            (
                f"`{name}`",
                kind_of(field),
                "yes" if name in required else "",
                field.get("description", ""),
            )
            for name, field in fields.items()
        ]
        yield from table(("field", "type", "required", "meaning"), *rows)


def kind_of(field: dict[str, Any]) -> str:
    """The JSON type of a field, with the bounds the schema gives it."""
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(kind_of(option) for option in options))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    kind = str(field.get("type", "any"))
    bounds = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    limits = [f"{word} {field[key]:g}" for key, word in bounds.items() if key in field]
    return f"{kind} {' and '.join(limits)}".strip()


def changes() -> Iterator[str]:
    yield "## What `POST /taper/policy` takes"
    rows = [
        (f"`{name}`", f"`{default}`", accepted_change(name))
        for name, default in msgspec.structs.asdict(PolicyParams()).items()
    ]
    yield from table(("key", "without a flag", "accepted"), *rows)


def accepted_change(name: str) -> str:
    """What the errors for a wrong word and a wrong number say; the longer one."""
    said = []
    for wrong in ("?", -1):
        try:
            updated_params(PolicyParams(), {name: wrong})
        except FieldError as error:
            said.append(error.accepted)
    return max(said, key=len)


def metadata() -> Iterator[str]:
    yield "## Metadata of a request"
    yield '`sampling_params.custom_params["taper"]` on `/generate`;'
    yield "`custom_params.taper` on the OpenAI routes.\n"
    rows = []
    for field in msgspec.structs.fields(BranchMeta):
        try:
            parse_branch_meta({"group": "g", field.name: NOTHING})
        except FieldError as error:
            rows.append((f"`{field.name}`", f"`{field.default}`", error.accepted))
    yield from table(("key", "default", "accepted"), *rows)
    headers = (TTFT_HEADER, TPOT_HEADER, FRONT_END_HEADER)
    keys = ("ttft_slo_ms", "tpot_slo_ms", "front_end")
    pairs = [(f"`{h}`", f"`{k}`") for h, k in zip(headers, keys, strict=True)]
    yield from table(("header", "the same as"), *pairs)


# -- flags


def settings() -> Iterator[str]:
    yield "## Flags of the server"
    yield "Beside those of `sglang.launch_server`.\n"
    rows = [
        (
            f"`{flag_of(f.name)}`",
            f"`{env_of(f.name)}`",
            "" if f.default is None else f"`{f.default}`",
            accepted_by(f.metadata["accepted"]),
            f.metadata["help"],
        )
        for f in dataclasses.fields(TaperConfig)
    ]
    head = ("flag", "environment", "default", "accepted", "meaning")
    yield from table(head, *rows)


def accepted_by(accepted: object) -> str:
    if isinstance(accepted, tuple):
        return ", ".join(f"`{value}`" for value in accepted)
    return "" if accepted is None else str(accepted)


def commands() -> Iterator[str]:
    for name, parser in subparsers(_parser()).items():
        yield f"## `sglang-taper {name}`"
        flags = [a for a in parser._actions if a.dest != "help"]
        yield from table(
            ("flag", "default", "meaning"), *(flag_row(action) for action in flags)
        )


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = (
        a for a in parser._actions if isinstance(a, argparse._SubParsersAction)
    )
    return dict(action.choices)


def flag_row(action: argparse.Action) -> tuple[str, str, str]:
    names = (
        ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest}`"
    )
    default = action.default
    text = (action.help or "") % {"default": default}
    says_it = "default" in text or default in (None, "", argparse.SUPPRESS)
    shown = "" if says_it or default is False else f"`{default}`"
    if action.choices:
        text += f" ({', '.join(map(str, action.choices))})"
    return names, shown, text


# -- Python


def classes() -> Iterator[str]:
    yield "## Python"
    for cls in CLASSES:
        yield f"### `{cls.__module__}.{cls.__name__}`"
        yield inspect.cleandoc(cls.__doc__ or "") + "\n"
        if fields := list(attributes(cls)):
            yield "\n".join(("```python", *fields, "```", ""))
        if members := list(methods(cls)):
            yield from table(("member", "meaning"), *members)


def attributes(cls: type) -> Iterator[str]:
    """Fields of a struct or dataclass, with their types."""
    if issubclass(cls, msgspec.Struct) or dataclasses.is_dataclass(cls):
        for name, kind in inspect.get_annotations(cls).items():
            yield f"{name}: {kind}"


def methods(cls: type) -> Iterator[tuple[str, str]]:
    for name, member in vars(cls).items():
        is_init = name == "__init__" and cls.__init__.__doc__ not in (
            None,
            object.__init__.__doc__,
        )
        if name.startswith("_") and not is_init:
            continue
        if isinstance(member, property):
            yield f"`{name}`", first_sentence(member.fget)
        elif inspect.isfunction(member):
            signature = str(inspect.signature(member)).replace("'", "")
            yield (
                f"`{name if not is_init else cls.__name__}{signature}`",
                first_sentence(member),
            )


def first_sentence(function: Any) -> str:
    text = inspect.cleandoc(getattr(function, "__doc__", None) or "")
    return re.split(r"(?<=[.])\s", text.replace("\n", " "))[0]


if __name__ == "__main__":
    print(page(), end="")
