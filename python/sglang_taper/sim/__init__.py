"""The decode loop on a virtual clock, driving the policy objects of the engine.

What is simulated is the engine around them: prefills, step times, places for requests.
Deadlines, step views, plans and step records come from `policy/` itself.
"""
