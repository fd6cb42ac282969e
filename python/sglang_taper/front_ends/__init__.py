"""Front ends: programs whose forks the model or a recipe decides, run by the server.

A front end is a generator of plain data: it yields the parts to generate next and is
sent what they said. Nothing here does input or output, reads a clock, or imports torch
or sglang; `engine/front_end_driver.py` runs the parts.
"""
