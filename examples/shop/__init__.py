"""A shop that counts the words of its tenants' documents; `python -m examples.shop` starts all of it.

To read in this order: models, web, api, jobs, alembic/versions, __main__. README.md has the picture.
"""
