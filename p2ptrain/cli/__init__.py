"""The command line, the only package that reads argv and the environment.

Each module in `commands` has ``add_arguments`` and ``run``. Slow imports stay inside ``run``, so that ``--help`` is
immediate. A command's module docstring, after its first paragraph, is its help text.
"""
