"""The tokens of DeepSeek-V4's prompt grammar, as text. The bars are U+FF5C and the low line is U+2581.

Source: model specification, section 6. V4 has no token for the system role, and ``｜DSML｜`` has no angle brackets.
"""

from __future__ import annotations

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"
NOISE = "<｜place▁holder▁no▁799｜>"
EXTRACTED_URL = "<｜extracted_url｜>"
IMAGE = "<｜image｜>"

TASK_TOKENS = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
"""The values of a message's ``task`` field and the token that each appends."""
