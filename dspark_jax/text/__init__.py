"""Text in and out: tokenizer, V4's message grammar, incremental detokenisation and stop strings. Needs no JAX."""
