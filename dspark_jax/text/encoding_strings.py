"""Texts that a checkpoint brings for its prompts: effort prefixes, the tool section, the response-format preamble.

They are read from the checkpoint's own encoding file, as constants: the file is parsed, never executed.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import logging
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Self

from dspark_jax.text import special_tokens as st

logger = logging.getLogger(__name__)

ENCODING_FILE = pathlib.PurePath("encoding", "encoding_dsv4.py")
MAX_FILE_BYTES = 2**20

# sha256 of the texts of known releases (model specification, section 6.1). A preview's max is the later releases' high.
KNOWN_HASHES = {
    "high": "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7",
    "max": "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c",
    "tools_head": "c7c9042638154a237b5d1bd48be772374a35a4d24c5cacfd1ffbd92703da329c",
    "tools_tail": "690702850fe256512cb1ee67c4e436ecb3e735c71ebee77ca45ff357a75fb5a7",
    "response_format_head": "5200f58413f49f3957c43beddbc97bead023232cb5934fad0c1997c30c139112",
}


class EncodingFileError(ValueError):
    """An encoding file that cannot be used. The message names the file and what is wrong."""


@dataclasses.dataclass(frozen=True)
class EncodingStrings:
    """``efforts``: the prefix of each effort level. ``tools_head`` and ``tools_tail`` surround the tools' schemas,
    one JSON object a line; ``response_format_head`` precedes the schema of an answer."""

    efforts: Mapping[str, str]
    tools_head: str
    tools_tail: str
    response_format_head: str

    def effort(self, level: str) -> str:
        """The prefix of a level; a level that the checkpoint does not know has none."""
        return self.efforts.get(level, "")

    @classmethod
    def from_file(cls, path: str | pathlib.Path) -> Self:
        """Reads the constants of an encoding file.

        Texts that are not those of a known release are used and logged. What the file lacks is taken from the built-in
        strings. Raises ``EncodingFileError`` for a file that is too large or not Python, or constants of a wrong type.
        """
        path = pathlib.Path(path)
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise EncodingFileError(f"{path} has more than {MAX_FILE_BYTES} bytes")
            constants = _constants(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            if isinstance(error, EncodingFileError):
                raise
            raise EncodingFileError(f"{path} cannot be read: {str(error)[:200]}") from None
        built_in = BUILT_IN_STRINGS
        efforts = _efforts(path, constants)
        head, tail = _split(
            path, constants, "tools_template", "tool_schemas", (built_in.tools_head, built_in.tools_tail)
        )
        preamble, _ = _split(path, constants, "response_format_template", "schema", (built_in.response_format_head, ""))
        strings = cls(efforts, head, tail, preamble)
        strings._report_unknown(path)
        return strings

    @staticmethod
    def from_checkpoint(directory: str | pathlib.Path | None) -> EncodingStrings:
        """The strings of a checkpoint directory, or the built-in ones if it has no encoding file."""
        path = pathlib.Path(directory, ENCODING_FILE) if directory is not None else None
        if path is None or not path.is_file():
            return BUILT_IN_STRINGS
        return EncodingStrings.from_file(path)

    def _report_unknown(self, path: pathlib.Path) -> None:
        texts = {
            "tools_head": self.tools_head,
            "tools_tail": self.tools_tail,
            "response_format_head": self.response_format_head,
        }
        texts |= {level: text for level, text in self.efforts.items() if text}
        known = set(KNOWN_HASHES.values())
        unknown = [name for name, text in texts.items() if hashlib.sha256(text.encode()).hexdigest() not in known]
        if unknown:
            logger.warning("%s: these texts are of no known release: %s", path, ", ".join(unknown))


# Without an encoding file (small and generated checkpoints): plain words of our own, and no effort prefixes, which mean
# something only to a model trained with them.
BUILT_IN_STRINGS = EncodingStrings(
    efforts={"low": "", "high": "", "max": ""},
    tools_head="## Tools\n\nThese functions may be called, one JSON schema on each line:\n\n",
    tools_tail=(
        f"\n\nA call is written as <{st.DSML}tool_calls> around one <{st.DSML}invoke> for each function, with a "
        f"<{st.DSML}parameter> for each argument.\n"
    ),
    response_format_head="## Response Format:\n\nThe reply must be JSON that follows this schema:\n",
)


def _constants(source: str) -> dict[str, Any]:
    """Module-level names (lower case) whose values are strings, or dictionaries of strings, put together from
    literals and from each other."""
    constants: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            names, value = [t.id for t in node.targets if isinstance(t, ast.Name)], node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            names, value = [node.target.id], node.value
        else:
            continue
        try:
            result = _evaluate(value, constants)
        except ValueError:
            continue  # an expression that is none of our constants
        constants |= {name.lower(): result for name in names}
    return constants


def _evaluate(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.Name(id=name) if name.lower() in constants:
            return constants[name.lower()]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = _evaluate(left, constants), _evaluate(right, constants)
            # Bounded, since texts that name each other twice would double with every line.
            if all(isinstance(part, str) for part in parts) and sum(map(len, parts)) <= MAX_FILE_BYTES:
                return parts[0] + parts[1]
        case ast.JoinedStr(values=values):
            parts = [_evaluate(value, constants) for value in values]
            if sum(map(len, parts)) <= MAX_FILE_BYTES:
                return "".join(parts)
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            text = _evaluate(value, constants)
            if isinstance(text, str):
                return text
        case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
            return {_evaluate(k, constants): _evaluate(v, constants) for k, v in zip(keys, values, strict=True) if k}
    raise ValueError("not a constant text")


def _efforts(path: pathlib.Path, constants: Mapping[str, Any]) -> dict[str, str]:
    efforts = constants.get("reasoning_effort_prompts")
    if efforts is None:
        # The previews know one prefix.
        text = constants.get("reasoning_effort_max", "")
        efforts = {"low": "", "high": "", "max": text}
    if not isinstance(efforts, dict) or not all(isinstance(text, str) for text in efforts.values()):
        raise EncodingFileError(f"{path}: REASONING_EFFORT_PROMPTS must map levels to texts")
    return efforts


def _split(
    path: pathlib.Path, constants: Mapping[str, Any], name: str, field: str, default: tuple[str, str]
) -> tuple[str, str]:
    """What stands before and after ``{field}`` of a template, its other fields replaced by the constants they name."""
    template = constants.get(name)
    if template is None:
        return default
    if not isinstance(template, str) or template.count(f"{{{field}}}") != 1:
        raise EncodingFileError(f"{path}: {name} must be a text with {{{field}}} once")
    known = {
        "dsml_token": st.DSML,
        "thinking_start_token": st.THINK,
        "thinking_end_token": st.END_THINK,
        "tc_block_name": "tool_calls",
        **{key: value for key, value in constants.items() if isinstance(value, str)},
    }

    def fill(text: str) -> str:
        filled = re.sub(r"(?<!\{)\{(\w+)\}(?!\})", lambda match: known.get(match[1].lower(), match[0]), text)
        return filled.replace("{{", "{").replace("}}", "}")

    head, tail = template.split(f"{{{field}}}")
    return fill(head), fill(tail)
