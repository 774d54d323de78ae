"""What a caller may ask of sampling: one frozen, self-checking dataclass."""

from __future__ import annotations

import dataclasses
import math

MAX_SEED = 2**63 - 1
# Below it logits divided by the temperature would leave float32; the law is a point mass long before.
MIN_TEMPERATURE = 1e-5


class SamplingParamsError(ValueError):
    """A sampling parameter is out of its range. ``parameter`` is the name of the offending field."""

    def __init__(self, parameter: str, message: str):
        super().__init__(message)
        self.parameter = parameter


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request.

    ``temperature`` 0 (below 1e-5) is greedy. ``top_k`` 0 (or -1) keeps the whole vocabulary. ``min_p`` drops tokens
    whose probability is below ``min_p`` times that of the most likely token. ``seed`` makes the output a function of
    the request alone: the same request with the same seed gives the same tokens in any batch. ``stop`` strings end the
    output before them (or after them with ``include_stop_str_in_output``); ``stop_token_ids`` and, unless
    ``ignore_eos``, the checkpoint's end token end it at a token. ``max_tokens`` None means up to the context limit.

    Raises ``SamplingParamsError`` naming the parameter, its range and the value got.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, 100.0)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._number("min_p", 0.0, 1.0)
        self._integer("top_k", -1, 2**31 - 1)
        if self.seed is not None:
            self._integer("seed", -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, 2**31 - 1)
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise SamplingParamsError("stop", f"stop must be non-empty strings, got {self.stop!r}")
        for token in self.stop_token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise SamplingParamsError("stop_token_ids", f"stop_token_ids must be token ids >= 0, got {token!r}")

    def _number(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(self, name)
        bracket = "(" if open_low else "["
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not ok or value > high or value < low or (open_low and value == low):
            raise SamplingParamsError(name, f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}")

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise SamplingParamsError(name, f"{name} must be an integer in [{low}, {high}], got {value!r}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < MIN_TEMPERATURE
