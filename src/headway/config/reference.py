"""The run file's reference as Markdown, written from the typed sections."""

from __future__ import annotations

import inspect

from headway.config.base import Section
from headway.config.layers import EXCLUSIVE
from headway.config.presets import PRESETS
from headway.config.run import RunConfig
from headway.config.schema import Key, all_keys, in_words, item_of, keys_of, members, section_of

_HEAD = """\
# The run file

<!-- Written by scripts/write_run_file_reference.py from src/headway/config/. Do not edit. -->

A run file is YAML. It says everything about one training; `headway train RUN.yaml` runs it, and
`headway train RUN.yaml --show` prints every key with its value and where the value came from.

```
headway train run.yaml data.seq_len=4096 parallel.fsdp=2
```

The least that must be written:

```yaml
model:
  path: ./model              # a Hugging Face causal language model
data:
  sources: [chats.jsonl]
  seq_len: 2048
train:
  epochs: 1
optim:
  lr: 2.0e-5
```

**Which value wins.** Defaults, then the preset, then the run file, then overrides on the command line; the last one
that sets a key wins. The value of an override is YAML (`data.sources=[a.jsonl,b.jsonl]`, `model.lora=null`,
`model.lora.rank=8`). Of these groups only one key counts, and an override of one replaces the run file's choice of
another:
{groups}.

**Relative paths.** In a run file they start from the run file's folder; in overrides, and in the default of `out`, from
the current folder. `~` is the home folder. A model or tokenizer that is no such
folder is taken as a name on the hub. The resolved `run.yaml` in the run folder holds absolute paths.

**Mistakes.** An unknown or repeated key, a wrong type or a value outside its limits stops the run before anything is
done; the message names file and line, the key, what was given and what is allowed. A setting that is valid but has no
effect is named in one line. Numbers and words are YAML 1.2's: `1e-5` is a number, `2_000` too; `yes`, `no`, `on`,
`off` are accepted where true or false is asked for and are plain text elsewhere.

**Identity.** Keys marked ● make the training what it is: a resume in which one has changed is refused with the list of
changes, unless `checkpoint.allow` names the key or its section.
"""

_TABLE = "| key | allowed | default | | meaning |\n|---|---|---|---|---|\n"


def reference_markdown() -> str:
    """The text of docs/run-file.md."""
    groups = ";\n".join(", ".join(f"`{key}`" for key in group) for group in EXCLUSIVE)
    top = [key for key in _own_keys(RunConfig, "") if key.nested is None]
    parts = [_HEAD.replace("{groups}", groups), "## At the top\n\n" + _table(top)]
    for key in all_keys().values():
        section = key.nested or section_of(item_of(key.field.annotation))
        if section is not None and not key.name.startswith("eval.data"):
            prefix = f"{key.name}." if key.nested else f"{key.name}[]."
            parts.append(_section(prefix, section, key.description))
    return "\n".join([*parts, _presets()])


def _own_keys(section: type[Section], prefix: str) -> list[Key]:
    return [key for key in keys_of(section, prefix) if key.section is section and _depth(key.name) == _depth(prefix)]


def _depth(name: str) -> int:
    return name.count(".")


def _section(prefix: str, section: type[Section], description: str) -> str:
    title = prefix.rstrip(".")
    about = " ".join(inspect.cleandoc(section.__doc__ or description).split())
    keys = [
        key for key in _own_keys(section, prefix) if key.nested is None or type(None) in members(key.field.annotation)
    ]
    return f"## `{title}`\n\n{about}\n\n" + _table(keys)


def _table(keys: list[Key]) -> str:
    return _TABLE + "".join(
        f"| `{key.name}` | {_cell(key.allowed)} | {_default(key)} | {'●' if key.identity else ''} "
        f"| {_cell(key.description)} |\n"
        for key in keys
    )


def _default(key: Key) -> str:
    return "**required**" if key.required else f"`{key.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _presets() -> str:
    names = [name for name in PRESETS if name != "none"]
    keys = list(dict.fromkeys(key for name in names for key in PRESETS[name]))
    head = "| key | " + " | ".join(f"`{name}`" for name in names) + " |\n|" + "---|" * (len(names) + 1) + "\n"
    rows = "".join(
        f"| `{key}` | "
        + " | ".join(f"`{in_words(PRESETS[name][key])}`" if key in PRESETS[name] else "" for name in names)
        + " |\n"
        for key in keys
    )
    return (
        "## Presets\n\n`preset: naive` is what fine-tuning scripts commonly run, the reference for comparisons; "
        "`preset: fast` is what Headway\nrecommends. A preset stands below the run file: what the file sets, wins.\n\n"
        + head
        + rows
    )
