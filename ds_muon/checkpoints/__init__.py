"""Checkpoints: what a run saves, and how it is loaded at any number of ranks and in any layout."""
