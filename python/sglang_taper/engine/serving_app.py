"""SGLang's HTTP app for the workers of `--tokenizer-worker-num` above 1.

Uvicorn starts those workers itself and imports the module that the environment
variable `SGLANG_HTTP_SERVER_APP_PATH` names; SGLang loads no plugins in them. This
one does, and fails the worker when our hooks are not in place.
"""

from __future__ import annotations

from fastapi import FastAPI


def _load_app() -> FastAPI:
    # First SGLang's server, so that the plugin recognises a tokenizer process.
    from sglang.srt.entrypoints.http_server import app as stock_app
    from sglang.srt.plugins import load_plugins

    from sglang_taper.engine import plugin
    from sglang_taper.engine.routes import install_routes
    from sglang_taper.errors import HookError

    load_plugins()
    if "control-channel" not in plugin.installed:
        raise HookError("SGLang did not load the plugin sglang_taper in this worker")
    install_routes(stock_app)
    return stock_app


app = _load_app()
