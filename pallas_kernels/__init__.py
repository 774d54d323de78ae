"""GPU kernels of DeepSeek-V4 serving, one folder per operation. Nothing here depends on ``dspark_jax``.

Each folder has the public function in ``__init__.py`` (checks arguments, picks an implementation) and ``reference.py``:
plain ``jax.numpy``, the meaning of the operation, and what runs where no kernel does. ``shapes.py`` names the real
shapes that tests and benchmarks use.

A row's result never depends on how many rows are computed with it: that is what makes greedy output the same with and
without speculation and in any batch.
"""
