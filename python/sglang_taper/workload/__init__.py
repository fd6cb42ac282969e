"""What is asked of a server: arrivals, request shapes, and how answers are scored.

Used by the simulator and by benchmarks of a real server alike. Seeded: the same
arguments give the same requests.
"""
