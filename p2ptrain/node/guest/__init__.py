"""A peer as a guest on its owner's machine: it pauses, resumes and leaves as the owner wishes, and counts what it gave.

::

    p2ptrain pause ──▶ control.sock ──┐
    schedule, load, battery ──────────┴──▶ Wishes ──▶ the role's parts: trainer, host, sender, serving
"""
