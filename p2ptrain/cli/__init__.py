"""The command line: one file per command, and the only place that reads argv and the environment.

`main` finds the command and turns errors into one line and an exit code. A command's module has ``add_arguments`` and
``run``; it imports what is heavy inside ``run``, so that ``--help`` answers at once.
"""
