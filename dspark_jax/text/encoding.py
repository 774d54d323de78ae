"""DeepSeek-V4's message grammar: conversations become prompts. There is no Jinja template.

A prompt is a list of segments: special ones are tokens of the grammar, the others came from people and tools and can
never become special tokens, whatever they spell. Joined, the segments are the reference's prompt text.
Source: model specification, sections 6.1 and 6.2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from dspark_jax.text import special_tokens as st
from dspark_jax.text.encoding_strings import BUILT_IN_STRINGS, EncodingStrings
from dspark_jax.text.tokenizer import Segment

Effort = Literal["low", "high", "max"]
Message = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool", "developer", "latest_reminder")
_BLANK_LINE = "\n\n"
_GRAMMAR_TOKENS = re.compile(
    "("
    + "|".join(
        map(re.escape, (st.BOS, st.EOS, st.USER, st.ASSISTANT, st.THINK, st.END_THINK, st.DSML, st.LATEST_REMINDER))
    )
    + ")"
)


class EncodingError(ValueError):
    """A conversation that V4's grammar cannot express. The message names the message and the field."""


def encode_messages(
    messages: Sequence[Message],
    *,
    thinking: bool = False,
    effort: Effort = "low",
    drop_thinking: bool = True,
    strings: EncodingStrings = BUILT_IN_STRINGS,
) -> list[Segment]:
    """The prompt after which the model writes the next assistant message.

    ``messages`` are those of the OpenAI API, plus ``reasoning_content`` (or ``reasoning``) of assistants, ``tools`` and
    ``response_format`` of a system or developer message, ``task`` of a user message and ``wo_eos`` of an assistant one.
    ``thinking`` opens a ``<think>`` section; ``effort`` then chooses the prefix from ``strings``. ``drop_thinking``
    leaves out the reasoning (and developer messages) before the last user turn; it has no effect if any message carries
    tools.

    Raises ``EncodingError`` for roles, contents and tool calls outside of the grammar.
    """
    if not messages:
        raise EncodingError("messages: expected at least one message")
    turns = _merge([_checked(i, message) for i, message in enumerate(messages)])
    drop_thinking = drop_thinking and not any(turn.get("tools") for turn in turns)
    last_user = _last_user(turns)
    if drop_thinking and thinking:
        turns = [turn for i, turn in enumerate(turns) if turn["role"] != "developer" or i >= last_user]
        last_user = _last_user(turns)
    out = [Segment(st.BOS, True)]
    if thinking:
        out += grammar(strings.effort(effort))
    for i, turn in enumerate(turns):
        # Reasoning belongs to the turn that opens it: the answer after the last user turn, or all of them.
        kept = thinking and (not drop_thinking or i >= last_user)
        following = turns[i + 1]["role"] if i + 1 < len(turns) else None
        after_task = i > 0 and "task" in turns[i - 1]
        match turn["role"]:
            case "system":
                out += _with_sections(turn, strings)
            case "latest_reminder":
                out += [Segment(st.LATEST_REMINDER, True), Segment(turn["content"])]
            case "assistant":
                out += _assistant(turn, kept and not after_task)
            case _:
                out.append(Segment(st.USER, True))
                out += _with_sections(turn, strings)
                opening = [Segment(st.ASSISTANT, True), Segment(st.THINK if kept else st.END_THINK, True)]
                if "task" in turn:
                    out += opening if turn["task"] == "action" else []
                    out.append(Segment(st.TASK_TOKENS[turn["task"]], True))
                elif following in (None, "assistant", "latest_reminder"):
                    out += opening
    return [segment for segment in out if segment.text]


def render(segments: Iterable[Segment]) -> str:
    """The prompt as text."""
    return "".join(segment.text for segment in segments)


def grammar(text: str) -> list[Segment]:
    """Segments of trusted text, in which special tokens mean themselves."""
    return [Segment(part, i % 2 == 1) for i, part in enumerate(_GRAMMAR_TOKENS.split(text)) if part]


def _last_user(turns: Sequence[Message]) -> int:
    return max((i for i, turn in enumerate(turns) if turn["role"] in ("user", "developer")), default=-1)


# -- checking and merging ---------------------------------------------------------------------------------------------
def _checked(index: int, message: Any) -> dict[str, Any]:
    """A message with ``content`` as text and everything else checked."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise EncodingError(f"{where}: expected an object, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise EncodingError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}")
    turn: dict[str, Any] = {"role": role, "content": _text(f"{where}.content", message.get("content"))}
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        turn["reasoning"] = _text(f"{where}.reasoning_content", reasoning)
        turn["calls"] = _tool_calls(where, message.get("tool_calls"))
        turn["wo_eos"] = bool(message.get("wo_eos"))
    elif message.get("content") is None:
        raise EncodingError(f"{where}.content is missing")
    if role == "tool":
        turn["call_id"] = message.get("tool_call_id")
    if role in ("system", "developer"):
        turn["tools"] = _tools(where, message.get("tools"))
        turn["response_format"] = message.get("response_format")
    task = message.get("task")
    if task is not None:
        if role not in ("user", "developer") or task not in st.TASK_TOKENS:
            raise EncodingError(f"{where}.task must be one of {', '.join(st.TASK_TOKENS)} of a user, got {task!r}")
        turn["task"] = task
    return turn


def _text(where: str, content: Any) -> str:
    """Text of a content that is a string, ``None`` or a list of text parts (joined by a blank line)."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise EncodingError(f"{where} must be text or a list of text parts, got {type(content).__name__}")
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise EncodingError(f"{where}[{i}] must be a part of type 'text' with its text, got {kind!r}")
        parts.append(part["text"])
    return _BLANK_LINE.join(parts)


def _tools(where: str, tools: Any) -> list[Any]:
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise EncodingError(f"{where}.tools must be a list of objects")
    functions = [tool.get("function", tool) for tool in tools]
    if not all(isinstance(f, Mapping) and isinstance(f.get("name"), str) for f in functions):
        raise EncodingError(f"{where}.tools: every tool must be a function with a name")
    return functions


def _tool_calls(where: str, calls: Any) -> list[tuple[str | None, str, dict[str, Any]]]:
    """``(id, function name, arguments)`` of each call."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise EncodingError(f"{where}.tool_calls must be a list, got {type(calls).__name__}")
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise EncodingError(f"{where}.tool_calls[{i}] must have a function with a name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise EncodingError(f"{where}.tool_calls[{i}].function.arguments is not valid JSON") from None
        if not isinstance(arguments, Mapping):
            raise EncodingError(f"{where}.tool_calls[{i}].function.arguments must be a JSON object")
        result.append((call.get("id"), function["name"], dict(arguments)))
    return result


def _merge(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns: consecutive user messages and tool results are one user turn, its results in the order of the calls."""
    turns: list[dict[str, Any]] = []
    order: dict[Any, int] = {}
    for message in messages:
        if message["role"] == "assistant":
            order = {call_id: i for i, (call_id, _, _) in enumerate(message["calls"])}
        if message["role"] not in ("user", "tool"):
            turns.append(message)
            continue
        result = message["role"] == "tool"
        text = f"<tool_result>{message['content']}</tool_result>" if result else message["content"]
        block = (order.get(message.get("call_id"), len(order)) if result else None, text)
        if not (turns and turns[-1]["role"] == "user" and "task" not in turns[-1]):
            turns.append({"role": "user", "blocks": []})
        turns[-1]["blocks"].append(block)
        if "task" in message:
            turns[-1]["task"] = message["task"]
    for turn in turns:
        if "blocks" in turn:
            blocks = turn.pop("blocks")
            results = iter(sorted((b for b in blocks if b[0] is not None), key=lambda b: b[0]))
            ordered = [block if block[0] is None else next(results) for block in blocks]
            turn["content"] = _BLANK_LINE.join(text for _, text in ordered)
    return turns


# -- rendering --------------------------------------------------------------------------------------------------------
def to_json(value: Any) -> str:
    """JSON as the reference writes it: ``", "`` and ``": "``, keys in their order, non-ASCII unescaped."""
    return json.dumps(value, ensure_ascii=False)


def _with_sections(turn: Message, strings: EncodingStrings) -> list[Segment]:
    """Content, then the tools and the response format that a message asks for."""
    out = [Segment(turn["content"])]
    if turn.get("tools"):
        schemas = "\n".join(to_json(function) for function in turn["tools"])
        out += [Segment(_BLANK_LINE), *grammar(strings.tools_head), Segment(schemas), *grammar(strings.tools_tail)]
    if turn.get("response_format"):
        schema = to_json(turn["response_format"])
        out += [Segment(_BLANK_LINE), *grammar(strings.response_format_head), Segment(schema)]
    return out


def _assistant(turn: Message, reasoning: bool) -> list[Segment]:
    out = [Segment(turn["reasoning"]), Segment(st.END_THINK, True)] if reasoning else []
    out.append(Segment(turn["content"]))
    if turn["calls"]:
        out += [Segment(_BLANK_LINE), *_dsml_tag("tool_calls"), Segment("\n")]
        for _, name, arguments in turn["calls"]:
            out += [*_dsml_tag("invoke", f' name="{name}"'), Segment("\n")]
            for i, (key, value) in enumerate(arguments.items()):
                is_text = isinstance(value, str)
                attributes = f' name="{key}" string="{"true" if is_text else "false"}"'
                out += [Segment("\n")] if i else []
                out += _dsml_tag("parameter", attributes)
                out += [Segment(value if is_text else to_json(value)), *_dsml_tag("parameter", closing=True)]
            out += [Segment("\n"), *_dsml_tag("invoke", closing=True), Segment("\n")]
        out += _dsml_tag("tool_calls", closing=True)
    return out if turn["wo_eos"] else [*out, Segment(st.EOS, True)]


def _dsml_tag(name: str, attributes: str = "", *, closing: bool = False) -> list[Segment]:
    return [Segment("</" if closing else "<"), Segment(st.DSML, True), Segment(f"{name}{attributes}>")]
