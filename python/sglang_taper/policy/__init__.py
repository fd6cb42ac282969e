"""Which branches run in a decode step: pure functions on plain data.

Nothing here reads a clock, a random number, an environment variable, or imports
torch or sglang: the same `StepView` gives the same `AdmissionPlan` on every rank.
"""
