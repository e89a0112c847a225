"""The training loop, its entry points and what they measure: metrics, reward manager, validation, checkpoints."""
