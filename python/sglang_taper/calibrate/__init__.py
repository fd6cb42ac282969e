"""`sglang-taper calibrate`: a step-latency profile of a machine, an engine, a model."""
