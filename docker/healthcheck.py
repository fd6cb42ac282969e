#!/usr/bin/env python3
"""Exit code 0 if the server on $PORT of this container says it is healthy, else 1.

One GET /health. SGLang answers it when the scheduler has, within 20 seconds; an idle
server generates one token for it. Standard library only.
"""

import os
import sys
import urllib.request

# Longer than SGLang's own limit, shorter than that of the container's engine.
TIMEOUT_S = 22


def main() -> int:
    url = f"http://127.0.0.1:{os.environ.get('PORT', '30000')}/health"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S):
            return 0
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
