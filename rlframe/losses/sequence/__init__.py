"""Losses that need all log-probabilities of a trajectory before they say anything about its tokens. One file a loss."""
