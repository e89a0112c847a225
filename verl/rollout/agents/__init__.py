"""Third-party agents: a chat completions endpoint for the policy, and the sessions that it records."""
