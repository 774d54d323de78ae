"""Answers prompts offline: ``python examples/generate.py "The capital of France is"``.

Without ``--model`` a generated tiny model with random weights answers. ``dspark-jax generate`` has more flags.
"""

import argparse

from dspark_jax.engine.llm import LLM
from dspark_jax.sampling_params import SamplingParams

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", default=["The capital of France is", "1, 2, 3,"])
    parser.add_argument("--model", metavar="DIR", help="checkpoint directory")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()

    llm = LLM(args.model)
    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=0)
    for output in llm.generate(args.prompts, sampling):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
