"""Decisions: from an observation to the desired numbers of workers;

the policies, their guards, explanations.
"""
