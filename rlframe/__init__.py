"""rlframe: reinforcement learning of language models from single, asynchronous rollouts."""
