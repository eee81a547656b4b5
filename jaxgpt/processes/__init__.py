"""A run of several processes: who takes part (launch), how they hear of each other (lines, peers), where all stop
(gate), and what they do together (together). Nothing here is part of a run's configuration, and nothing but `together`
imports JAX.
"""
