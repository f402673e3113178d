"""Training on top of the engine: draft heads, and reinforcement learning from its rollouts."""
