"""What Spark does with the queue, without Spark: staging, entering, reading, following. Nothing here imports pyspark.

Tasks of a cluster and the tests of this package call the same functions. Rows go in and out as Arrow record batches
through ADBC, in PostgreSQL's binary COPY format.

* :mod:`.place`: which database, and how to connect to it
* :mod:`.columns`: rows as the queue takes them, checked; :mod:`.lenient` and :mod:`.as_json` serve it
* :mod:`.loading`: rows into staging tables, staging tables into the queue, and what is left when a load dies
* :mod:`.rejects`: rows that were refused, in files
* :mod:`.reading`: tables in ranges, under one snapshot
* :mod:`.feeds`: the history as it grows
* :mod:`.archives`: an archive of it in Parquet; :mod:`.files`: what tasks do for that; :mod:`.digests`: its checksums
"""
