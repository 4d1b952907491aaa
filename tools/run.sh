#!/usr/bin/env bash
# `make run`: answers one prompt. Everything comes through the environment, so that no character of a prompt
# means anything to a shell: RUN_PROMPT, RUN_MODEL (a path or a name; empty: fetch the default), RUN_N.
# The arguments go to `millrace run` as they are. Who asks nothing sees an answer that the small model is good at,
# the same each time, and what to try next.
set -euo pipefail
cd "$(dirname "$0")/.."

program=build/release/millrace
model=${RUN_MODEL:-}
prompt=${RUN_PROMPT:-}
options=(-n "${RUN_N:-200}")
if [ -z "$model" ]; then
  model=$(python3 tools/fetch_model.py default)
fi
case "$model" in
  *stories15M*) # a base model: it has no chat, it goes on with a text
    options+=(--raw)
    question="Once upon a time"
    ;;
  *) question="What is photosynthesis?" ;;
esac
if [ -n "$prompt" ]; then
  exec "$program" run "$model" --prompt="$prompt" "${options[@]}" "$@"
fi
echo "> $question" >&2
# In the environment: an option of the same name on the line counts before it.
MILLRACE_TEMP=0 "$program" run "$model" --prompt="$question" "${options[@]}" "$@"
cat >&2 <<HINT

Next:  $program chat $model   # talk with it
       $program serve $model  # then open http://127.0.0.1:8080: a page, and OpenAI's API
       $program run qwen3-4b -p "Why is the sky blue?"  # a larger one, fetched if you say yes; others: list --known
HINT
