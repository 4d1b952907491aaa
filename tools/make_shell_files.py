#!/usr/bin/env python3
"""Writes the man page and the completions of bash, zsh and fish from what the program says of itself (--help).

  tools/make_shell_files.py build/release/millrace OUT    OUT/millrace.1, millrace.bash, _millrace, millrace.fish
"""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Option:
    names: list  # ["-p", "--prompt-tokens"]
    value: str  # "INT", "TEXT", "" for a flag
    text: str = ""
    choices: list = field(default_factory=list)


@dataclass
class Command:
    name: str
    text: str
    usage: str = ""
    options: list = field(default_factory=list)
    examples: str = ""


def help_of(program, *words):
    done = subprocess.run([program, *words, "--help"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join([program, *words])} --help: status {done.returncode}\n{done.stderr}")
    return done.stdout


def parse_options(text):
    """Lines of two spaces and a dash begin an option; deeper ones go on with its description."""
    options = []
    for line in text.split("\nExamples:")[0].splitlines():
        if match := re.match(r"  (-[^ ]+)(?: ([^ ].*?))?(?:  +(.*))?$", line):
            names, value, rest = match.group(1).split(","), match.group(2) or "", match.group(3) or ""
            # A long value and a short gap: the description stands behind the last run of spaces.
            choices = re.search(r"\{([^}]*)\}", value)
            options.append(Option(names, re.split(r"[:= ]", value)[0], rest,
                                  choices.group(1).split(",") if choices else []))
        elif options and re.match(r" {12,}\S", line):
            options[-1].text = f"{options[-1].text} {line.strip()}".strip()
    return options


def parse(program):
    main = help_of(program)
    listed = re.search(r"Subcommands:\n(.*?)\n\n", main, re.DOTALL)
    if listed is None:
        sys.exit(f"{program} --help lists no subcommands")
    commands = []
    for line in listed.group(1).splitlines():
        name, text = line.split(maxsplit=1)
        shown = help_of(program, name)
        usage = re.search(r"Usage: (.*)", shown)
        _, found, examples = shown.partition("\nExamples:\n")
        commands.append(Command(name, text, usage.group(1) if usage else "", parse_options(shown),
                                examples.rstrip() if found else ""))
    closing = main[listed.end():].strip()
    return commands, closing


def roff(text):
    return re.sub(r"^([.'])", r"\\&\1", text.replace("\\", "\\e").replace("-", "\\-"), flags=re.MULTILINE)


def man_page(commands, closing, version):
    lines = [f'.TH MILLRACE 1 "" "millrace {version}" "User Commands"', ".SH NAME",
             "millrace \\- run, serve, measure and quantize large language models", ".SH SYNOPSIS", ".B millrace",
             ".I COMMAND", "[options]", ".SH COMMANDS"]
    for command in commands:
        lines += [f".SS {roff(command.usage or command.name)}", roff(command.text) + "."]
        for option in command.options:
            names = ", ".join(f"\\fB{roff(name)}\\fR" for name in option.names)
            value = f" \\fI{roff(option.value)}\\fR" if option.value else ""
            lines += [".TP", names + value, roff(option.text) or "\\&"]
        if command.examples:
            lines += [".PP", "Examples:", ".nf", roff(command.examples), ".fi"]
    lines += [".SH MORE", ".nf", roff(closing), ".fi"]
    return "\n".join(lines) + "\n"


def bash(commands):
    cases = []
    for command in commands:
        words = " ".join(name for option in command.options for name in option.names)
        values = "".join(f"        {'|'.join(option.names)}) COMPREPLY=($(compgen -W '{' '.join(option.choices)}' -- \"$word\")); return ;;\n"
                         for option in command.options if option.choices)
        case = f"      case $before in\n{values}      esac\n" if values else ""
        cases.append(f"    {command.name})\n{case}      options='{words}' ;;\n")
    names = " ".join(command.name for command in commands)
    return f"""# bash completion for millrace
_millrace() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} options=
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{names} --help --version' -- "$word"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{''.join(cases)}  esac
  case $word in
    -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
    *) COMPREPLY=($(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -F _millrace millrace
"""


def quoted(text):
    return text.replace("'", "").replace("[", "(").replace("]", ")").replace(":", " -")


def zsh(commands):
    listing = "\n".join(f"    '{command.name}:{quoted(command.text)}'" for command in commands)
    cases = []
    for command in commands:
        rows = []
        for option in command.options:
            action = f":{option.value}:({' '.join(option.choices)})" if option.choices else (
                f":{option.value}:_files" if option.value else "")
            rows += [f"      '{name}[{quoted(option.text)}]{action}'" for name in option.names]
        cases.append(f"  {command.name}) _arguments \\\n" + " \\\n".join([*rows, "      '*:file:_files'"]) + " ;;")
    body = "\n".join(cases)
    return f"""#compdef millrace
local -a commands
commands=(
{listing}
)
if (( CURRENT == 2 )); then
  _describe command commands
  return
fi
local command=$words[2]
shift words
(( CURRENT-- ))
case $command in
{body}
esac
"""


def fish(commands):
    names = " ".join(command.name for command in commands)
    lines = ["# fish completion for millrace"]
    for command in commands:
        lines.append(f"complete -c millrace -f -n 'not __fish_seen_subcommand_from {names}' -a {command.name} "
                     f"-d '{quoted(command.text)}'")
        for option in command.options:
            flags = "".join(f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in option.names)
            value = f" -x -a '{' '.join(option.choices)}'" if option.choices else " -r" if option.value else ""
            lines.append(f"complete -c millrace -n '__fish_seen_subcommand_from {command.name}'{flags}{value} "
                         f"-d '{quoted(option.text)}'")
    return "\n".join(lines) + "\n"


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    program, out = sys.argv[1], Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    commands, closing = parse(program)
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.split()[-1]
    (out / "millrace.1").write_text(man_page(commands, closing, version))
    (out / "millrace.bash").write_text(bash(commands))
    (out / "_millrace").write_text(zsh(commands))
    (out / "millrace.fish").write_text(fish(commands))


if __name__ == "__main__":
    main()
