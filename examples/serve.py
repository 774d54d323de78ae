"""Serves a checkpoint over an OpenAI-compatible API: ``python examples/serve.py --model DIR`` (``--help`` for more).

Without ``--model`` a generated tiny model with random weights is served. Then:

    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32, "stream": true}'
"""

import sys

from dspark_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
