"""The PPO-family training loop and the lookup of its algorithms."""
