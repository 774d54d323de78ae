"""An engine without a model: it replays given token ids in given groups."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dspark_jax.engine.request import FinishReason, Request, RequestError, RequestUpdate, check_prompt

type Groups = Iterable[Sequence[int]]
"""What one request generates: each group holds the tokens of one step. May be endless; groups may be empty."""

type Script = Sequence[Groups] | Mapping[tuple[int, ...], Groups] | Callable[[Request], Groups]
"""Groups by order of arrival, by prompt, or by a function of the request."""


@dataclasses.dataclass(eq=False)
class _Running:
    request: Request
    groups: Iterator[Sequence[int]]
    num_output: int = 0


class ScriptedEngine:
    """Implements ``engine.request.EngineCore`` by replaying ``script``: tests need no model.

    Every step admits waiting requests while slots are free, then commits one group to each running request, cut exactly
    as the protocol says: at the end token (unless ``ignore_eos``), at a stop token id, at ``max_tokens``, at
    ``max_model_len``. A request whose script has run out produces ``eos_token_id``, like a model that has nothing more
    to say. An empty group is a step without news for its request. All but the first token of a group count as accepted
    drafts.

    ``step_seconds`` makes every step take that long. ``on_step`` is called with the step's number (from 0) before the
    step does anything: it may block (an engine that hangs) or raise (an engine that fails).
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        eos_token_id: int,
        max_model_len: int = 2048,
        max_num_seqs: int = 8,
        step_seconds: float = 0.0,
        on_step: Callable[[int], None] | None = None,
    ):
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.requests: list[Request] = []
        """Every request ever added, in order of arrival."""
        self._script = script
        self._step_seconds = step_seconds
        self._on_step = on_step
        self._waiting: collections.deque[_Running] = collections.deque()
        self._running: dict[str, _Running] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises ``RequestError`` for an empty or too long prompt, ids outside the vocabulary, an id
        in use, or a request that the script does not know."""
        check_prompt(request, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        if request.request_id in self._running or any(
            w.request.request_id == request.request_id for w in self._waiting
        ):
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        groups = self._groups(request)
        self.requests.append(request)
        self._waiting.append(_Running(request, itertools.chain(groups, itertools.repeat((self.eos_token_id,)))))

    def _groups(self, request: Request) -> Groups:
        if callable(self._script):
            return self._script(request)
        try:
            if isinstance(self._script, Mapping):
                return self._script[request.prompt_token_ids]
            return self._script[len(self.requests)]
        except LookupError:
            raise RequestError(f"the script has nothing for request number {len(self.requests)}", "prompt") from None

    def abort(self, request_id: str) -> None:
        """Ends a request, waiting or running. Unknown ids are ignored. Emits no update."""
        known = len(self._waiting) + len(self._running)
        self._running.pop(request_id, None)
        self._waiting = collections.deque(w for w in self._waiting if w.request.request_id != request_id)
        self._counts["aborted"] += known - len(self._waiting) - len(self._running)

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[RequestUpdate]:
        """Admits what fits and commits one group to each running request."""
        number = self._counts["steps"]
        self._counts["steps"] += 1
        if self._on_step is not None:
            self._on_step(number)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        while self._waiting and len(self._running) < self.max_num_seqs:
            admitted = self._waiting.popleft()
            self._running[admitted.request.request_id] = admitted
        updates = []
        for running in list(self._running.values()):
            group = next(running.groups)
            if group:
                updates.append(self._commit(running, group))
        return updates

    def _commit(self, running: _Running, group: Sequence[int]) -> RequestUpdate:
        request, sampling = running.request, running.request.sampling
        room = self.max_model_len - len(request.prompt_token_ids)
        limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        committed: list[int] = []
        reason: FinishReason | None = None
        stop_token: int | None = None
        for token in group:
            committed.append(token)
            running.num_output += 1
            if token in sampling.stop_token_ids or (token == self.eos_token_id and not sampling.ignore_eos):
                reason, stop_token = FinishReason.STOP, token
            elif running.num_output >= limit:
                reason = FinishReason.LENGTH
            if reason is not None:
                del self._running[request.request_id]
                self._counts["finished"] += 1
                break
        self._counts["generated_tokens"] += len(committed)
        self._counts["accepted"] += len(committed) - 1
        return RequestUpdate(
            request.request_id,
            tuple(committed),
            finish_reason=reason,
            stop_token_id=stop_token,
            num_drafted=len(group) - 1,
            num_accepted=len(committed) - 1,
        )

    def counters(self) -> dict[str, float]:
        """``running``, ``waiting``, ``free_slots``; since the start: ``steps``, ``finished``, ``aborted``,
        ``generated_tokens``, ``accepted`` (drafts)."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "free_slots": self.max_num_seqs - len(self._running),
            **{name: self._counts[name] for name in ("steps", "finished", "aborted", "generated_tokens", "accepted")},
        }
