"""Goodput of real servers: requests as a client sends them, scored as the simulator's.

Scripts of this directory import it; it is not part of the package.
"""
