"""Benchmarks: the operators and the model against what a user would run instead, in one run, interleaved.

`python -m kda_jax bench ops` and `python -m kda_jax bench model` call `benchmarks.ops.main` and
`benchmarks.model.main`. No assertion is made on time: a figure is reported with the machine it was taken on.
What is asserted, before any clock starts, is that every contender computes the same numbers.
"""
