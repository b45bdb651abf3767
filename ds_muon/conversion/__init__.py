"""``ds-muon to-universal`` and ``ds-muon migrate``: checkpoints for other readers, and from other writers."""
