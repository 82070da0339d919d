"""``python -m fairqueue.demo``: one tenant uploads thousands of files, fifteen others three each. Who waits?

The same load goes through a queue in arrival order (``FOR UPDATE SKIP LOCKED``, as most queues in PostgreSQL do it) and
through fairqueue: the same worker processes do the same work on the same files. At the end stand a table, a
picture, and the proof in SQL that each file was done exactly once.

* ``command.py``: the options
* ``show.py``: from the first line to the last
* ``load.py``: the files, and who uploads which
* ``work.py``: what is done with a file
* ``tables.py``: the application's tables and the migration that installs them together with fairqueue
* ``queues.py``: the two queues behind one small protocol
* ``worker.py``: what a worker process does
* ``run.py``: workers, load and progress of one run
* ``progress.py``: bars on a terminal, lines elsewhere
* ``figures.py``: what the database says afterwards
* ``report.py``, ``picture.py``: the same in words and as a picture

Runs on an embedded PostgreSQL, or on the server in FAIRQUEUE_DSN, where it uses two schemas of its own and drops
them at the end. Needs ``pip install 'fairqueue[demo]'``.
"""
