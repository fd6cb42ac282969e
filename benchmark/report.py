"""Tables and figures of what `benchmark/goodput.py` wrote.

    python benchmark/report.py F.jsonl [--figures DIR] [--rescore ttft:MS tpot:MS]

`--rescore` scores saved requests (`--output-details`) at another SLO, for policies
that do not look at theirs. Figures need the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from goodput_lib.figures import draw_all
from goodput_lib.rescoring import rescored
from goodput_lib.tables import markdown_tables, provenance

from sglang_taper.errors import FieldError, TaperError
from sglang_taper.workload.score import parse_slos


def read_results(paths: Sequence[str]) -> list[dict[str, Any]]:
    """All objects of the files, in order; raises FieldError for another file."""
    results = []
    for path in paths:
        try:
            lines = Path(path).read_text().splitlines()
            found = [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise FieldError("FILE", path, f"a JSONL file ({error})") from None
        if not all("token_goodput" in result for result in found):
            raise FieldError("FILE", path, "what benchmark/goodput.py wrote")
        results += found
    return results


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--figures", metavar="DIR", help="also draw PNG files here")
    parser.add_argument("--rescore", nargs="+", metavar="KEY:MS")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        results = read_results(args.files)
        if args.rescore:
            results = rescored(results, parse_slos(args.rescore))
        print(f"{markdown_tables(results)}\n\n{provenance(results)}")
        if args.figures:
            for path in draw_all(results, Path(args.figures)):
                print(path, file=sys.stderr)
    except TaperError as error:
        print(f"report.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
