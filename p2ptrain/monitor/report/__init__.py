"""The page of a finished run, and the files that it is made from."""
