"""Token goodput of branch policies on real servers, on the same requests.

    python benchmark/goodput.py --preset cpu-contested --output-file F.jsonl

One server, policies switched while it runs and in turns; `stock` is SGLang without our
plugin, a second server. One JSON object per policy, round and SLO is appended as it
is ready. docs/benchmark.md explains the keys; `benchmark/report.py` makes tables and
figures of the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from goodput_lib.options import Options
from goodput_lib.results import append_result
from goodput_lib.rounds import Comparison
from goodput_lib.servers import live_servers, shared_flags
from goodput_lib.tables import markdown_tables

from sglang_taper.errors import TaperError


async def compare(
    options: Options, note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """All results of a call; they are appended to `--output-file` as they come."""
    results = []
    async with live_servers(options, note) as servers:
        comparison = Comparison(options, servers, note)
        async with contextlib.aclosing(comparison.run()) as found:
            async for result in found:
                results.append(result)
                if options.args.output_file:
                    append_result(options.args.output_file, result)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    # Whoever ends this ends its servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    note = functools.partial(print, file=sys.stderr, flush=True)
    try:
        options = Options.from_argv(argv)
        if options.args.print_server_flags:
            print(shlex.join([*shared_flags(options), *options.taper_flags]))
            return 0
        results = asyncio.run(compare(options, note))
    except TaperError as error:
        print(f"goodput.py: error: {error}", file=sys.stderr)
        return 2
    print(markdown_tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
