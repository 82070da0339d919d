"""Figures of fairness, speed and cost, each against a reference that is measured in the same run.

::

    python -m benchmarks                  # six minutes, into build/benchmarks
    python -m benchmarks --full           # all, at full size, four and a half hours
    python -m benchmarks fairness spark   # some

`systems` has one file for each queue that takes part, `scenarios` one for each question that is asked of them.
Not installed with the package.
"""
