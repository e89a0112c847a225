"""Agents that somebody else wrote: a chat completions endpoint over the policy, and what it records."""
