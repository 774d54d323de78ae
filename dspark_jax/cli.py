"""The command line: ``dspark-jax serve | generate | plan | convert``."""

from __future__ import annotations

import argparse
import json
import logging
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from dspark_jax.config import ConfigError, EngineConfig, PageStyle, Precision, SpeculativeConfig
from dspark_jax.sampling_params import SamplingParams, SamplingParamsError

if TYPE_CHECKING:
    from dspark_jax.engine.request import EngineCore
    from dspark_jax.text.encoding_strings import EncodingStrings
    from dspark_jax.text.tokenizer import Tokenizer

# JAX and everything that needs it are imported by the commands: --help and errors in the flags are instant.

logger = logging.getLogger("dspark_jax")


class UsageError(Exception):
    """What the user asked for cannot be done. The message says why; a traceback would not help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status. Bad flags and unusable models exit with status 2 and a message."""
    parser = build_parser()
    args = parser.parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return args.run(args)
    except UsageError as error:
        parser.exit(2, f"{parser.prog} {args.command}: error: {error}\n")
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Parsed arguments carry the command's function as ``run``."""
    parser = argparse.ArgumentParser(prog="dspark-jax", description="DeepSeek-V4 with its DSpark drafter, in JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="OpenAI-compatible HTTP server", formatter_class=_HelpFormatter)
    add_engine_arguments(serve)
    add_serve_arguments(serve)
    serve.set_defaults(run=run_serve)

    generate = commands.add_parser("generate", help="answer prompts and exit", formatter_class=_HelpFormatter)
    add_engine_arguments(generate)
    add_generate_arguments(generate)
    generate.set_defaults(run=run_generate)

    plan = commands.add_parser(
        "plan",
        help="capacity, buckets, attention splits and memory of an engine, without a device",
        formatter_class=_HelpFormatter,
    )
    add_engine_arguments(plan)
    add_plan_arguments(plan)
    plan.set_defaults(run=run_plan)

    convert = commands.add_parser(
        "convert", help="store a checkpoint's converted parameters, for a faster start", formatter_class=_HelpFormatter
    )
    convert.add_argument("source", metavar="CHECKPOINT", help="checkpoint directory")
    convert.add_argument("target", metavar="DIR", help="new directory; serve it with --model")
    _add_precision_arguments(convert)
    convert.set_defaults(run=run_convert)

    for command in (serve, generate, plan, convert):
        command.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _add_precision_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = EngineConfig()
    parser.add_argument(
        "--precision",
        choices=get_args(Precision),
        default=defaults.precision,
        help="checkpoint: quantise activations and cache as trained; exact: quantise nothing",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=defaults.dtype, help="of activations")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model and the fields of ``EngineConfig``. ``engine_config`` reads them back."""
    defaults = EngineConfig()
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "--model", metavar="DIR", help="checkpoint directory; without it, a generated tiny model with random weights"
    )
    group.add_argument("--max-num-seqs", type=int, default=defaults.max_num_seqs, metavar="N", help="request slots")
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=defaults.max_num_batched_tokens,
        metavar="N",
        help="prompt tokens in one step",
    )
    group.add_argument(
        "--max-model-len", type=int, default=defaults.max_model_len, metavar="N", help="longest prompt plus output"
    )
    group.add_argument(
        "--num-blocks", type=int, metavar="N", help="cache blocks of 256 tokens; default: enough for all"
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="drafts verified in one step; 0 turns speculation off; default: what the checkpoint was trained for",
    )
    group.add_argument(
        "--draft-sampling",
        choices=("probabilistic", "greedy"),
        default=defaults.speculative.draft_sampling,
        help="how drafts are chosen",
    )
    group.add_argument(
        "--depth-schedule",
        type=_pairs,
        metavar="N:K,...",
        help="draft K tokens while up to N requests run, e.g. 32:5,64:3; nothing beyond the last N; default: always K",
    )
    group.add_argument("--seed", type=int, default=defaults.seed, help="of requests that bring none")
    _add_precision_arguments(parser)
    shapes = parser.add_argument_group("compiled shapes and caches")
    shapes.add_argument(
        "--decode-buckets", type=_integers, metavar="N,...", help="request counts to compile decode steps for"
    )
    shapes.add_argument(
        "--prefill-buckets", type=_integers, metavar="N,...", help="token counts to compile prefill steps for"
    )
    shapes.add_argument(
        "--decode-row-capacity",
        type=int,
        metavar="N",
        help="rows that a verification is planned for; default: all that the scheduler can present",
    )
    shapes.add_argument(
        "--page-style",
        choices=get_args(PageStyle),
        default=defaults.page_style,
        help="stride of cache pages: their payload, padded to 576 bytes, or all layers' pages of a block side by side",
    )
    shapes.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=defaults.prefix_caching,
        help="keep blocks of finished requests for prompts that begin alike",
    )
    shapes.add_argument(
        "--num-prefix-tails",
        type=int,
        metavar="N",
        help="block boundaries that a cached prompt can be continued at; default: one for every four blocks",
    )


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (part.split(":") for part in text.split(","))
    return tuple((int(first), int(second)) for first, second in pairs)


# What argparse calls the types in its errors.
_integers.__name__, _pairs.__name__ = "list of integers", "list of N:K pairs"


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "plan", "--model may also be the name of a released configuration: flash or pro. No weights are read."
    )
    group.add_argument("--heads", type=int, metavar="N", help="query heads of one device; default: all")
    group.add_argument("--index-topk", type=int, metavar="N", help="entries that CSA selects; default: the model's")
    group.add_argument("--json", action="store_true", help="print JSON")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    group.add_argument("--served-model-name", metavar="NAME", help="default: the checkpoint directory's name")
    group.add_argument("--max-waiting", type=int, default=256, metavar="N", help="queued requests before a 503")
    group.add_argument(
        "--step-timeout", type=float, default=60.0, metavar="S", help="seconds after which a step counts as hung"
    )
    group.add_argument(
        "--shutdown-timeout", type=int, default=10, metavar="S", help="seconds that open requests have at shutdown"
    )


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts and sampling")
    group.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to continue, or a question with --chat")
    group.add_argument("--chat", action="store_true", help="prompts are messages of a user")
    group.add_argument("--thinking", action="store_true", help="with --chat: the model thinks first")
    group.add_argument("--max-tokens", type=int, default=64, metavar="N", help="longest output")
    group.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="0 keeps the whole vocabulary")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="relative to the most likely token")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the output; may be repeated")
    group.add_argument("-n", type=int, default=1, metavar="N", help="answers to each prompt")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the flags ask for. Raises ``UsageError`` for values out of range."""
    try:
        return EngineConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
            num_blocks=args.num_blocks,
            precision=args.precision,
            dtype=args.dtype,
            speculative=SpeculativeConfig(args.num_speculative_tokens, args.draft_sampling, args.depth_schedule),
            seed=args.seed,
            decode_row_capacity=args.decode_row_capacity,
            decode_buckets=args.decode_buckets,
            prefill_buckets=args.prefill_buckets,
            page_style=args.page_style,
            prefix_caching=args.prefix_caching,
            num_prefix_tails=args.num_prefix_tails,
        )
    except ConfigError as error:
        raise UsageError(str(error)) from None


def run_serve(args: argparse.Namespace) -> int:
    """Loads and warms up the engine, then serves until SIGINT or SIGTERM."""
    from dspark_jax.server.run import bind, make_server, serve_forever

    config = engine_config(args)
    _require(args.max_waiting >= 0, f"--max-waiting must be at least 0, got {args.max_waiting}")
    _require(args.step_timeout > 0, f"--step-timeout must be positive, got {args.step_timeout}")
    _require(0 <= args.port < 2**16, f"--port must be in [0, 65535], got {args.port}")
    try:
        # Bound first, so that an address in use is known before the model is loaded. It opens when the server listens.
        listener = bind(args.host, args.port)
    except OSError as error:
        raise UsageError(f"cannot listen on {args.host} port {args.port}: {error.strerror or error}") from None
    with listener:
        from dspark_jax.engine.async_engine import AsyncEngine
        from dspark_jax.server.app import create_app

        strings = _strings(args)
        core, tokenizer, name = _build(args, config)
        engine = AsyncEngine(
            core, max_running=config.max_num_seqs, max_waiting=args.max_waiting, step_timeout_s=args.step_timeout
        )
        app = create_app(engine, tokenizer, args.served_model_name or name, strings=strings)
        host, port = listener.getsockname()[:2]
        logger.info("ready: http://%s:%d/v1", f"[{host}]" if ":" in host else host, port)
        serve_forever(make_server(app, shutdown_timeout_s=args.shutdown_timeout), listener)
    return 0


def run_generate(args: argparse.Namespace) -> int:
    """Prints the answers to the prompts of the command line."""
    config = engine_config(args)
    _require(args.chat or not args.thinking, "--thinking needs --chat")
    _require(args.n >= 1, f"-n must be at least 1, got {args.n}")
    try:
        sampling = SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            max_tokens=args.max_tokens,
            stop=tuple(args.stop),
        )
    except SamplingParamsError as error:
        raise UsageError(str(error)) from None
    from dspark_jax.engine.llm import LLM
    from dspark_jax.engine.request import RequestError

    strings = _strings(args)
    core, tokenizer, _ = _build(args, config)
    llm = LLM(core=core, tokenizer=tokenizer, strings=strings)
    try:
        if args.chat:
            conversations = [[{"role": "user", "content": prompt}] for prompt in args.prompts]
            outputs = llm.chat(conversations, sampling, thinking=args.thinking, n=args.n)
        else:
            outputs = llm.generate(args.prompts, sampling, n=args.n)
    except RequestError as error:
        raise UsageError(str(error)) from None
    for prompt, output in zip(args.prompts, outputs, strict=True):
        for completion in output.outputs:
            print(f"{prompt!r} -> {completion.text!r} ({completion.finish_reason}, {len(completion.token_ids)} tokens)")
    return 0


def run_plan(args: argparse.Namespace) -> int:
    """Prints the plan of the engine that these flags describe."""
    config = engine_config(args)
    from dspark_jax.checkpoint import tiny_config_json
    from dspark_jax.checkpoint.released import RELEASED
    from dspark_jax.config import ModelConfig
    from dspark_jax.engine.plan import EnginePlan

    try:
        if args.model is None or args.model in RELEASED:
            model = ModelConfig.from_hf(RELEASED[args.model] if args.model else tiny_config_json())
        else:
            model = ModelConfig.from_dir(args.model)
        plan = EnginePlan.create(model, config, heads=args.heads, index_topk=args.index_topk)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    print(json.dumps(plan.to_json(), indent=2) if args.json else plan.to_text())
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Reads a checkpoint once and stores its parameters stacked and in their final dtype."""
    from dspark_jax.checkpoint import CheckpointError
    from dspark_jax.engine.build import convert

    try:
        target = convert(args.source, args.target, precision=args.precision, dtype=args.dtype)
    except (ConfigError, CheckpointError) as error:
        raise UsageError(str(error)) from None
    logger.info("converted for precision %s, dtype %s: %s", args.precision, args.dtype, target)
    return 0


def _build(args: argparse.Namespace, config: EngineConfig) -> tuple[EngineCore, Tokenizer, str]:
    """The warmed-up engine, its tokenizer and the model's name."""
    from dspark_jax.checkpoint import CheckpointError
    from dspark_jax.engine.build import DEFAULT_MODEL_NAME, build_engine, use_compilation_cache
    from dspark_jax.text.tokenizer import TokenizerError

    use_compilation_cache()
    try:
        core, tokenizer = build_engine(args.model, config)
    except (ConfigError, CheckpointError, TokenizerError) as error:
        raise UsageError(str(error)) from None
    return core, tokenizer, pathlib.Path(args.model).resolve().name if args.model else DEFAULT_MODEL_NAME


def _strings(args: argparse.Namespace) -> EncodingStrings:
    """The checkpoint's prompt texts: read before the model is, which takes long."""
    from dspark_jax.text.encoding_strings import EncodingFileError, EncodingStrings

    try:
        return EncodingStrings.from_checkpoint(args.model)
    except EncodingFileError as error:
        raise UsageError(str(error)) from None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)
