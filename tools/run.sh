#!/usr/bin/env bash
# `make run`: answers one prompt. Everything comes through the environment, so that no character of a prompt
# means anything to a shell: MILLRACE_PROMPT, MILLRACE_MODEL (a path; empty: fetch the default), MILLRACE_N.
# The arguments go to `millrace run` as they are.
set -euo pipefail
cd "$(dirname "$0")/.."

model=${MILLRACE_MODEL:-}
prompt=${MILLRACE_PROMPT:-}
options=()
if [ -z "$model" ]; then
  model=$(python3 tools/fetch_model.py default)
fi
case "$model" in
  *stories15M*) # a base model: it has no chat, it goes on with a text
    options+=(--raw)
    : "${prompt:=Once upon a time}"
    ;;
esac
: "${prompt:=What is a millrace? Answer in two sentences.}"
exec build/release/millrace run "$model" --prompt="$prompt" -n "${MILLRACE_N:-200}" "${options[@]}" "$@"
