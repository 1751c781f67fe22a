"""What lies in a directory of weights: files, their sizes, and what its index asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher.facts.base import HOME, shell

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

# The Engram tables; of a whole original checkpoint only the shards that hold them are needed.
TABLES = r"layers\.[0-9]+\.engram\.(embed\.(weight|scale)|embed_tokens\.(weight|weight_scale_inv))"


@dataclass(frozen=True)
class Tree:
    """``sizes`` has the .json and .safetensors files, links resolved; ``broken`` dangling links."""

    exists: bool
    readable: bool = True
    sizes: dict[str, int] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()  # all that the index names
    tables: tuple[str, ...] = ()  # those of them with Engram tables
    total_size: int | None = None  # bytes of all tensors, as the index says
    hashes: dict[str, str] = field(default_factory=dict)

    def bytes_of(self, names: tuple[str, ...]) -> int:
        return sum(self.sizes.get(name, 0) for name in names)


@dataclass(frozen=True)
class TreesFact:
    """Of the first two paths: the model's directory and the Engram's; an empty one is skipped.

    The index stays on its node: it has some 100,000 lines, of which the file names matter.
    """

    key: str = "trees"
    argv: tuple[str, ...] = shell(
        'n=0; for p in "$1" "$2"; do n=$((n+1)); [ -n "$p" ] || continue; '
        + HOME
        + '; printf "tree %s\\n" "$n"; '
        '[ -d "$q" ] || { echo absent; continue; }; '
        '[ -r "$q" ] && [ -x "$q" ] || { echo unreadable; continue; }; '
        '( cd -- "$q" || exit; '
        "find -L . -maxdepth 1 -type f \\( -name '*.safetensors' -o -name '*.json' \\) "
        "-printf 'file %s %f\\n'; "
        "find . -maxdepth 1 -xtype l -printf 'broken %f\\n'; "
        f"i={INDEX}; "
        '[ -r "$i" ] || exit; '
        'grep -o \'"total_size"[[:space:]]*:[[:space:]]*[0-9]*\' "$i" | head -n 1; '
        'grep -oE \'"[^"]*\\.safetensors"\' "$i" | sort -u | '
        "sed 's/^\"\\(.*\\)\"$/shard \\1/'; "
        f'grep -oE \'{TABLES}"[[:space:]]*:[[:space:]]*"[^"]*\\.safetensors"\' "$i" | '
        'sed \'s/.*"\\([^"]*\\)"$/table \\1/\' | sort -u ); '
        f'( cd -- "$q" && for f in {CONFIG} {INDEX}; do '
        '[ -r "$f" ] && sha256sum "$f" | sed "s/^/sha /"; done ); done; true'
    )
    takes_paths: bool = True

    def parse(self, text: str) -> dict[int, Tree]:
        """By position of the path, from 1."""
        rows: dict[int, list[str]] = {}
        number = 0
        for row in text.splitlines():
            word, _, rest = row.partition(" ")
            if word == "tree" and rest.isdigit():
                number = int(rest)
                rows[number] = []
            elif number:
                rows[number].append(row)
        return {number: _tree(found) for number, found in rows.items()}


def _tree(rows: list[str]) -> Tree:
    sizes: dict[str, int] = {}
    hashes: dict[str, str] = {}
    named: dict[str, list[str]] = {"broken": [], "shard": [], "table": []}
    total: int | None = None
    for row in rows:
        word, _, rest = row.partition(" ")
        if row == "absent":
            return Tree(exists=False)
        if row == "unreadable":
            return Tree(exists=True, readable=False)
        if word == "file":
            size, _, name = rest.partition(" ")
            if size.isdigit():
                sizes[name] = int(size)
        elif word == "sha":
            digest, _, name = rest.partition("  ")
            hashes[name] = digest
        elif word in named:
            named[word].append(rest)
        elif row.startswith('"total_size"'):
            digits = row.rpartition(":")[2].strip()
            total = int(digits) if digits.isdigit() else None
    return Tree(
        exists=True,
        sizes=sizes,
        broken=tuple(named["broken"]),
        shards=tuple(named["shard"]),
        tables=tuple(named["table"]),
        total_size=total,
        hashes=hashes,
    )
