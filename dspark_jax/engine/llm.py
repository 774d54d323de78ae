"""The offline API: prompts in, texts out, in the caller's own thread."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tqdm import tqdm

from dspark_jax.config import EngineConfig, SpeculativeConfig
from dspark_jax.engine.output import OutputAssembler
from dspark_jax.engine.request import EngineCore, FinishReason, Request
from dspark_jax.sampling_params import SamplingParams
from dspark_jax.text.encoding import encode_messages
from dspark_jax.text.encoding_strings import EncodingStrings
from dspark_jax.text.tokenizer import Tokenizer

type Prompt = str | Sequence[int]
"""Text, or token ids."""

type Conversation = Sequence[Mapping[str, Any]]
"""Chat messages as in the OpenAI API."""


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One generated answer. ``token_ids`` include the token that ended it, which is not part of ``text``.

    ``stop_reason`` is the stop string or the one of ``stop_token_ids`` that ended it, if one did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt. ``prompt`` is None if it was given as token ids."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]


class LLM:
    """Loads a model and generates.

    ``model`` is a checkpoint directory, or None for the generated tiny checkpoint with random weights. Other keywords
    are fields of ``EngineConfig``, and ``num_speculative_tokens`` and ``draft_sampling`` of ``SpeculativeConfig``. A
    ready engine may be given as ``core`` with its ``tokenizer`` (and prompt ``strings``) instead; it must have no
    other user.

    Raises ``ConfigError``, ``CheckpointError`` or ``TokenizerError`` saying what is wrong with model or keywords.
    """

    def __init__(
        self,
        model: str | pathlib.Path | None = None,
        *,
        core: EngineCore | None = None,
        tokenizer: Tokenizer | None = None,
        strings: EncodingStrings | None = None,
        num_speculative_tokens: int | None = None,
        draft_sampling: Literal["probabilistic", "greedy"] = "probabilistic",
        progress: bool = True,
        **engine: Any,
    ):
        self.strings = strings or EncodingStrings.from_checkpoint(model)
        if core is None:
            # Here, so that texts and servers can be tested without JAX.
            from dspark_jax.engine.build import build_engine

            speculative = SpeculativeConfig(num_speculative_tokens, draft_sampling)
            core, loaded = build_engine(model, EngineConfig(speculative=speculative, **engine), progress=progress)
            tokenizer = tokenizer or loaded
        elif model is not None or engine or tokenizer is None:
            raise TypeError("a ready core comes with its tokenizer and takes neither a model nor engine settings")
        self.core: EngineCore = core
        self.tokenizer: Tokenizer = tokenizer
        self._progress = progress
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
    ) -> list[RequestOutput]:
        """``n`` answers to each prompt, in the order of ``prompts``; a single prompt gives a list of one.

        ``sampling`` holds for all prompts, or is one for each; default ``SamplingParams()``. Raises ``RequestError`` if
        a prompt cannot be served (before anything is generated), ``RuntimeError`` if the engine fails.
        """
        each: Sequence[Prompt] = prompts if _is_batch(prompts) else [prompts]  # pyright: ignore[reportAssignmentType]
        sampling = sampling or SamplingParams()
        samplings = [sampling] * len(each) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(samplings) != len(each):
            raise ValueError(
                f"sampling must be one for all or one for each of {len(each)} prompts, got {len(samplings)}"
            )
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        texts = [prompt if isinstance(prompt, str) else None for prompt in each]
        ids = [tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt) for prompt in each]
        run = next(self._ids)
        requests = [
            Request(f"{run}-{i}-{choice}", token_ids, samplings[i], choice)
            for i, token_ids in enumerate(ids)
            for choice in range(n)
        ]
        outputs = self._run(requests)
        return [RequestOutput(*fields) for fields in zip(texts, ids, itertools.batched(outputs, n), strict=True)]

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool = False,
        effort: Literal["low", "high", "max"] = "low",
        n: int = 1,
    ) -> list[RequestOutput]:
        """``generate`` for conversations, or for a single one. The default ``sampling`` has no limit on tokens.

        In thinking mode the text holds ``</think>`` between reasoning and answer. Raises ``EncodingError`` for messages
        that V4's grammar cannot express.
        """
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        each: Any = [conversations] if single else conversations
        prompts = [
            encode_messages(list(messages), thinking=thinking, effort=effort, strings=self.strings) for messages in each
        ]
        ids = [self.tokenizer.encode_segments(prompt) for prompt in prompts]
        return self.generate(ids, sampling or SamplingParams(max_tokens=None), n=n)

    def _run(self, requests: Sequence[Request]) -> list[CompletionOutput]:
        live: dict[str, int] = {}
        assemblers = [OutputAssembler(self.tokenizer, request.sampling) for request in requests]
        texts: list[list[str]] = [[] for _ in requests]
        tokens: list[list[int]] = [[] for _ in requests]
        done: dict[int, CompletionOutput] = {}
        try:
            for index, request in enumerate(requests):
                self.core.add_request(request)
                live[request.request_id] = index
            with tqdm(total=len(requests), desc="generating", unit="request", disable=not self._progress) as bar:
                while live:
                    if not self.core.has_work():
                        raise RuntimeError(f"the engine has lost {len(live)} requests")
                    for update in self.core.step():
                        index = live.get(update.request_id)
                        if index is None:
                            continue
                        if update.finish_reason is FinishReason.ERROR:
                            raise RuntimeError(f"request {index} failed: {update.error}")
                        piece = assemblers[index].push(update)
                        texts[index].append(piece.text)
                        tokens[index] += piece.token_ids
                        if piece.finish_reason is not None:
                            if update.finish_reason is None:  # at a stop string, which the engine knows nothing of
                                self.core.abort(update.request_id)
                            del live[update.request_id]
                            done[index] = CompletionOutput(
                                requests[index].choice,
                                "".join(texts[index]),
                                tuple(tokens[index]),
                                piece.finish_reason,
                                piece.stop_reason,
                            )
                            bar.update()
        finally:
            for request_id in live:
                self.core.abort(request_id)
        return [done[index] for index in range(len(requests))]


def _is_batch(prompts: Prompt | Sequence[Prompt]) -> bool:
    return not isinstance(prompts, str) and not (prompts and all(isinstance(item, int) for item in prompts))
