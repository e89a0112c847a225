"""Training loop of PPO and related algorithms."""
