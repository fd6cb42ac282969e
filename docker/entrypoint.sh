#!/bin/sh
# Flags of the container are flags of the server; anything else is run as it is:
#   docker run IMAGE --model-path MODEL --tp-size 8
#   docker run IMAGE sglang-taper calibrate --help
set -eu

case "${1:--}" in
    -*) ;;
    *) exec "$@" ;;
esac

# What does not fit is said before a model is loaded, not after.
if ! report=$(sglang-taper check); then
    printf '%s\n' "$report" >&2
    exit 2
fi
# exec: the server itself gets the signals. A later --host or --port wins over these.
exec python3 -m sglang_taper.launch_server --host 0.0.0.0 --port "${PORT:-30000}" "$@"
