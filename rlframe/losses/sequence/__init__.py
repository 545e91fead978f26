"""Losses that need all log-probabilities of a trajectory before they weight its tokens. One file per loss."""
