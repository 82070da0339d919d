"""A queue at random, with and without faults: processes that do whatever is allowed, and what must hold all the same.

`place` prepares a database; `life` is what one process does; `crew` starts, stops, and kills processes; `troubles` are
the faults; `witness` looks on; `ending` drains the queue and compares everything that was written down. The tests are
in `test_faults`. FAIRQUEUE_TEST_SECONDS is how long processes act (make soak), FAIRQUEUE_TEST_SEED repeats what they
choose, as far as it can be repeated.
"""
