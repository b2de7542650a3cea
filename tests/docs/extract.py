"""What a page tells its reader to run: shell commands, Python blocks, and files that it shows in full."""

import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = (
    "streamrl", "make", "python", "python3", "pip", "torchrun", "source", "export", "git", "cd", "ssh", "scp", "curl",
    "docker", "srun", "sbatch", "kubectl", "hf", "huggingface-cli", "wandb", "mlflow", "tensorboard", "trackio", "uv",
    "vllm", "cat", "head", "ls", "tail", "kill", "cp", "mkdir", "apt-get", "nvidia-smi", "cffconvert", "mkdocs",
    "jupyter", "optuna", "optuna-dashboard",
)
"""First words that make a line of a block without a language a command; a shell block needs none of them."""

SHELL = ("bash", "sh", "shell", "console")
VARIABLE = r"[A-Z_][A-Z0-9_]*=\S*"
COMMAND = re.compile(
    rf"(?:{VARIABLE} +)*(?:(?:\S*\.venv/)?bin/[\w.-]+|(?:sudo +)?(?:{'|'.join(PROGRAMS)})|\S+\.sh)(?= |$)"
)
FENCE = re.compile(r"( *)(`{3,}|~{3,}) *(.*?) *$")
FILE_NAME = re.compile(r"(?:#|//|--) *([\w./-]+\.(?:py|ya?ml|jsonl?|sh|toml|csv|txt))(?: .*)?$")
TITLE = re.compile(r'title="([\w./-]+\.\w+)"')
INLINE = re.compile(r"(?<!`)`(streamrl +(?:[a-z]+ +)[^`]+|torchrun +[^`]+)`(?!`)")


@dataclass(frozen=True, slots=True)
class Item:
    """One thing a reader runs or writes, in the order of the page.

    Attributes:
        kind: "shell" (one command), "python" (a block without a file name) or "file" (content of the file `name`).
        inline: a command inside a sentence.
    """

    page: str
    line: int
    kind: str
    text: str
    name: str = ""
    inline: bool = False

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(slots=True)
class _Page:
    name: str
    items: list[Item] = field(default_factory=list)

    def add_block(self, line: int, info: str, lines: list[str]) -> None:
        """A fenced block whose first content line is `line`."""
        text = textwrap.dedent("\n".join(lines))
        words = info.replace("{", " ").split()
        language = words[0].strip(".").lower() if words and "=" not in words[0] else ""
        name = TITLE.search(info) or FILE_NAME.match(text.partition("\n")[0])
        if name is not None and language not in SHELL:
            self.items.append(Item(self.name, line, "file", text + "\n", name[1]))
        elif language in ("python", "py"):
            self.items.append(Item(self.name, line, "python", text + "\n"))
        elif language in ("", *SHELL):
            self.add_commands(line, text.splitlines(), every_line=language in SHELL)

    def add_commands(self, line: int, lines: list[str], every_line: bool) -> None:
        prompts = any(text.startswith("$ ") for text in lines)
        for number, text in _joined(lines):
            typed = text.removeprefix("$ ")
            if prompts and typed == text:
                continue  # the output of a command that was typed after a prompt
            command = typed if "\n" in typed else re.sub(r"(?:^|\s+)#(?:\s.*)?$", "", typed).strip()
            if command and (every_line or prompts or COMMAND.match(command)):
                self.items.append(Item(self.name, line + number, "shell", command))

    def add_inline(self, line: int, text: str) -> None:
        for found in INLINE.finditer(text):
            command = " ".join(found[1].split())
            number = line + text[: found.start()].count("\n")
            self.items.append(Item(self.name, number, "shell", command, inline=True))


def _joined(lines: list[str]) -> list[tuple[int, str]]:
    """(offset, command) of a block's lines: continued lines and here-documents are one command."""
    found: list[tuple[int, str]] = []
    number = 0
    while number < len(lines):
        start, text = number, lines[number].strip()
        while text.endswith("\\") and number + 1 < len(lines):
            number += 1
            text = f"{text[:-1].rstrip()} {lines[number].strip()}"
        here = re.search(r"<<-?\s*'?(\w+)'?", text)
        while here and number + 1 < len(lines):
            number += 1
            text += "\n" + lines[number]
            if lines[number].strip() == here[1]:
                break
        found.append((start, text))
        number += 1
    return found


def extract(path: Path, name: str | None = None) -> list[Item]:
    """Everything on a Markdown page, in order; `name` is what messages call it."""
    page = _Page(name or str(path.relative_to(ROOT)))
    lines = path.read_text(encoding="utf-8").splitlines()
    prose: list[str] = []
    number = 0

    def end_prose(before: int) -> None:
        if prose:
            page.add_inline(before - len(prose) + 1, "\n".join(prose))
            prose.clear()

    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence:
            end_prose(number)
            close = number + 1
            while close < len(lines) and not re.fullmatch(rf" *{fence[2][0]}{{{len(fence[2])},}} *", lines[close]):
                close += 1
            page.add_block(number + 2, fence[3], lines[number + 1 : close])
            number = close + 1
        elif lines[number].startswith("    ") and (number == 0 or not lines[number - 1].strip()):
            end_prose(number)
            close = number
            while close < len(lines) and lines[close].startswith("    "):
                close += 1
            page.add_commands(number + 1, lines[number:close], every_line=False)
            number = close
        else:
            prose.append(lines[number])
            number += 1
    end_prose(number)
    return page.items


def pages(root: Path = ROOT) -> list[Path]:
    """README first, then the pages of docs/ and the examples; results are records and give no instructions."""
    docs = [path for path in sorted((root / "docs").rglob("*.md")) if "results" not in path.parts]
    more = [root / name for name in ("AGENTS.md", "CONTRIBUTING.md") if (root / name).exists()]
    return [root / "README.md", *docs, *sorted((root / "examples").rglob("*.md")), *more]


def all_items(root: Path = ROOT) -> list[Item]:
    return [item for path in pages(root) for item in extract(path, str(path.relative_to(root)))]
