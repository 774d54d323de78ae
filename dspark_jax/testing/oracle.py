"""The oracle: what greedy decoding must give, computed the slow way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.testing.session import Session


@dataclasses.dataclass(frozen=True)
class OracleResult:
    """Greedy continuation of a prompt.

    ``gaps[i]`` is the difference of the two largest logits where ``tokens[i]`` was chosen: a disagreement at a tiny gap
    is a rounding matter, anywhere else it is a bug.
    """

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


class Oracle:
    """One request, no cache reuse, no speculation: the whole sequence is recomputed from nothing for every step.

    ``model`` should be in ``exact`` precision with float32 activations (``Policy.create(config, "exact", "float32")``).
    Sequences are padded to one length so that the oracle compiles once.
    """

    def __init__(self, model: DeepseekV4, max_length: int):
        self._session = Session(model, max_length)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 logits ``[len(tokens), V]`` at every position, in one pass from an empty cache."""
        self._session.reset()
        padding = [0] * (self._session.max_length - len(tokens))  # causal: what follows changes nothing before it
        return self._session.extend([*tokens, *padding]).logits[: len(tokens)]

    def generate(self, prompt: Sequence[int], num_tokens: int, *, guess: Sequence[int] = ()) -> OracleResult:
        """Greedy continuation by ``num_tokens`` (end tokens are ordinary here).

        ``guess`` is a continuation to check: one pass confirms its longest right prefix, so a right guess costs one
        pass. The result does not depend on it.
        """
        out: list[int] = []
        gaps: list[float] = []
        while len(out) < num_tokens:
            ahead = list(guess[len(out) : num_tokens]) if list(guess[: len(out)]) == out else []
            logits = self.logits([*prompt, *out, *ahead])
            for i in range(len(ahead) + 1):
                if len(out) == num_tokens:
                    break
                row = logits[len(prompt) + len(out) - 1]
                second, first = np.partition(row, -2)[-2:]
                out.append(int(row.argmax()))
                gaps.append(float(first - second))
                if i < len(ahead) and out[-1] != ahead[i]:
                    break
        return OracleResult(tuple(out), tuple(gaps))


def oracle_generate(
    model: DeepseekV4, prompt: Sequence[int], num_tokens: int, *, guess: Sequence[int] = ()
) -> OracleResult:
    """Greedy decoding by recomputing the whole sequence at every step.

    For many calls make one ``Oracle``: it compiles once.
    """
    return Oracle(model, len(prompt) + num_tokens).generate(prompt, num_tokens, guess=guess)
