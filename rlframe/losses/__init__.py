"""Losses: one file each; `base` has what they take and give."""
