"""`python -m sglang_taper.launch_server`: SGLang's server with policy `taper`.

Takes every flag of `python -m sglang.launch_server` and the group "branch
parallelism". Exits with code 2 when a flag is bad, a mode is refused, or SGLang did
not load our plugin.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str] | None = None) -> None:
    """Serve until stopped; ends all processes it started."""
    argv = sys.argv[1:] if argv is None else argv
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from sglang_taper.engine import flags, plugin

    flags.defaults["branch_policy"] = "taper"
    load_plugins()
    if "flags" not in plugin.installed:
        plugin.exit_with(
            "SGLang did not load the plugin sglang_taper: is SGLANG_PLUGINS or "
            "SGLANG_PLATFORM set without it?"
        )
    server_args = prepare_server_args(argv)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
